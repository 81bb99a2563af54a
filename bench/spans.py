"""What a span costs: ours and the SDK's, made and encoded side by side, and a request's whole set of spans held.

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
from components.telemetry.otlp_encoder import encode_request, encode_resource, encode_span, span_field
from components.telemetry.spans import Spans, TraceRate

BATCH: Final = 512  # spans in one OTLP request
FACTS: Final[Mapping[str, str | int]] = {
    "kvmesh.decode.instance": "a1b2c3d4",
    "kvmesh.cached_tokens": 128,
}  # a common span has two or three
A_REQUEST: Final = 23  # spans of a disaggregated request, of all processes


def made(tracer: trace.Tracer, count: int) -> None:
    """Spans below one parent, as a service makes them."""
    with tracer.start_as_current_span("parent"):
        for _ in range(count):
            with tracer.start_as_current_span("decode.choose_prefill") as span:
                for name, value in FACTS.items():
                    span.set_attribute(name, value)


def held(count: int) -> None:
    """Unsampled requests: their spans are made, held, and dropped with the root."""
    traces = HeldTraces(lambda _: None)
    tracer = Spans(traces.take, TraceRate(0), holds=True)
    root: dict[str, Any] = {"kind": trace.SpanKind.SERVER, "attributes": {"kvmesh.request_id": "x"}}
    for _ in range(count // A_REQUEST):
        with tracer.start_as_current_span("chat", **root):
            for _ in range(A_REQUEST - 1):
                with tracer.start_as_current_span("decode.choose_prefill") as span:
                    for name, value in FACTS.items():
                        span.set_attribute(name, value)


def sdk_spans(count: int) -> tuple[trace.Tracer, Sequence[ReadableSpan]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("kvmesh")
    made(tracer, count)
    return TracerProvider(shutdown_on_exit=False).get_tracer("kvmesh"), exporter.get_finished_spans()


def encoded(spans: Sequence[LightSpan]) -> None:
    encode_request(encode_resource({"service.name": "x"}), [span_field(encode_span(span)) for span in spans])


def best_us(work: Callable[[], Any], count: int, turns: int) -> float:
    """Processor time a span, in microseconds: the median of the turns."""
    work()
    times = []
    for _ in range(turns):
        began = time.process_time()
        work()
        times.append((time.process_time() - began) / count)
    return statistics.median(times) * 1e6


def main(turns: int = 20) -> None:
    ours: list[LightSpan] = []
    made(Spans(ours.append), BATCH)
    tracer, theirs = sdk_spans(BATCH)
    make = best_us(lambda: made(Spans(lambda _: None), BATCH), BATCH, turns)
    make_sdk = best_us(lambda: made(tracer, BATCH), BATCH, turns)
    encode = best_us(lambda: encoded(ours), BATCH, turns)
    encode_sdk = best_us(lambda: encode_spans(theirs).SerializeToString(), BATCH, turns)
    hold = best_us(lambda: held(BATCH), BATCH, turns)
    print(f"{'µs a span':24}{'ours':>8}{'SDK':>8}{'ratio':>8}")
    for name, us, sdk_us in (("made, with 2 attributes", make, make_sdk), ("encoded", encode, encode_sdk)):
        print(f"{name:24}{us:8.2f}{sdk_us:8.2f}{us / sdk_us:8.2f}")
    print(f"{'made and held':24}{hold:8.2f}")


if __name__ == "__main__":
    typer.run(main)
