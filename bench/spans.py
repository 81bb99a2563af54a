"""The cost of a span: a request's step compared with the SDK's span, made and encoded, and held until the request ends.

python -m bench.spans
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import typer
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from components.telemetry.held_traces import HeldTraces
from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import encode_request, encode_resource, encode_whole
from components.telemetry.packed_spans import pack_spans
from components.telemetry.spans import Spans, step
from components.token_bucket import TokenBucket

BATCH: Final = 512  # spans in one OTLP request
# a common span has two or three attributes
FACTS: Final[Mapping[str, str | int]] = {"kvmesh.decode.instance": "a1b2c3d4", "kvmesh.cached_tokens": 128}
STEPS: Final = 8  # spans of a request in one process


def made(tracer: trace.Tracer, count: int) -> None:
    """Make spans below one parent, as the SDK does."""
    with tracer.start_as_current_span("parent"):
        for _ in range(count):
            with tracer.start_as_current_span("decode.choose_prefill") as span:
                for name, value in FACTS.items():
                    span.set_attribute(name, value)


def stepped(tracer: Spans, count: int) -> None:
    """Make steps of requests, as a service does."""
    for _ in range(count // STEPS):
        with tracer.start_as_current_span("decode.request", kind=trace.SpanKind.SERVER):
            for _ in range(STEPS - 1):
                with step("decode.choose_prefill") as choosing:
                    choosing.note(FACTS)


def sdk_spans(count: int) -> tuple[trace.Tracer, Sequence[ReadableSpan]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("kvmesh")
    made(tracer, count)
    return TracerProvider(shutdown_on_exit=False).get_tracer("kvmesh"), exporter.get_finished_spans()


def encoded(spans: Sequence[LightSpan]) -> None:
    encode_request(encode_resource({"service.name": "x"}), [encode_whole(span) for span in spans])


def best_us(work: Callable[[], Any], count: int, turns: int) -> float:
    """Return the CPU time per span in microseconds, the median of the turns."""
    work()
    times = []
    for _ in range(turns):
        began = time.process_time()
        work()
        times.append((time.process_time() - began) / count)
    return statistics.median(times) * 1e6


def main(turns: int = 20) -> None:
    ours: list[LightSpan] = []
    stepped(Spans(ours.append), BATCH)
    tracer, theirs = sdk_spans(BATCH)
    make = best_us(lambda: stepped(Spans(lambda _: None), BATCH), BATCH, turns)
    make_sdk = best_us(lambda: made(tracer, BATCH), BATCH, turns)
    encode = best_us(lambda: encoded(ours), BATCH, turns)
    pack = best_us(lambda: pack_spans(ours), BATCH, turns)
    encode_sdk = best_us(lambda: encode_spans(theirs).SerializeToString(), BATCH, turns)
    held = HeldTraces(lambda _: None)
    hold = best_us(lambda: stepped(Spans(held.take, TokenBucket(0), holds=True), BATCH), BATCH, turns)
    print(f"{'µs per span':24}{'ours':>8}{'SDK':>8}{'ratio':>8}")
    rows = (
        ("made, with 2 attributes", make, make_sdk),
        ("encoded as OTLP", encode, encode_sdk),
        ("packed for the observer", pack, encode_sdk),
    )
    for name, us, sdk_us in rows:
        print(f"{name:24}{us:8.2f}{sdk_us:8.2f}{us / sdk_us:8.2f}")
    print(f"{'made and held':24}{hold:8.2f}")


if __name__ == "__main__":
    typer.run(main)
