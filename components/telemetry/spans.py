"""Spans: one trace per request across all processes, kept on disk and exported over OTLP when an endpoint is set."""

import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from importlib import import_module
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from components.settings import MeshSettings
from components.telemetry.logs import configure_logs
from components.telemetry.sampler import RateSampler
from components.telemetry.trace_store import TraceStoreExporter

_propagator: Final = TraceContextTextMapPropagator()

OTLP: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # imported where there is a collector: 60 ms
OTLP_TIMEOUT_S: Final = 2  # a collector that is away must not hold up a stop
EXPORT_EVERY_MS: Final = 300  # soon enough that `inspect trace last` shows the request just made


class Spans:
    """OpenTelemetry's tracer, except that below a span that is not kept nothing is made.

    Where only some requests are traced, each span of the others would take 7 us for ids and contexts that nobody gets.
    """

    def __init__(self, inner: trace.Tracer) -> None:
        self._inner = inner

    def start_span(self, name: str, context: Context | None = None, **options: Any) -> trace.Span:
        """A span below the current one, or that of `context`."""
        parent = trace.get_current_span(context)
        return parent if _is_dropped(parent) else self._inner.start_span(name, context, **options)

    def start_as_current_span(
        self, name: str, context: Context | None = None, **options: Any
    ) -> AbstractContextManager[trace.Span]:
        """The same, as the current span for the time of the block."""
        parent = trace.get_current_span(context)
        if not _is_dropped(parent):
            return self._inner.start_as_current_span(name, context, **options)
        return nullcontext(parent) if context is None else trace.use_span(parent)


def _is_dropped(span: trace.Span) -> bool:
    """Whether it belongs to a trace that is not kept."""
    if span.is_recording():
        return False
    context = span.get_span_context()
    return context.is_valid and not context.trace_flags.sampled


tracer: Final = Spans(trace.get_tracer("kvmesh"))


@asynccontextmanager
async def start_telemetry(settings: MeshSettings, role: str, instance_id: str) -> AsyncIterator[None]:
    """Logs and spans of this process; leaving it writes what is still queued."""
    configure_logs(settings.log_level, settings.log_format)
    name = f"{role}-{instance_id}"
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"kvmesh-{role}", "service.instance.id": instance_id}),
        sampler=ParentBased(ALWAYS_ON if math.isinf(settings.traces_per_s) else RateSampler(settings.traces_per_s)),
    )
    kept = TraceStoreExporter(settings.home, name)
    provider.add_span_processor(BatchSpanProcessor(kept, max_queue_size=16384, schedule_delay_millis=EXPORT_EVERY_MS))
    if settings.otlp_endpoint:
        endpoint = f"{settings.otlp_endpoint.rstrip('/')}/v1/traces"
        otlp: SpanExporter = import_module(OTLP).OTLPSpanExporter(endpoint=endpoint, timeout=OTLP_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(otlp))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def trace_headers() -> dict[str, str]:
    """`traceparent` of the current span, for the headers of a message."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier


def trace_context(headers: Mapping[str, str] | None) -> Context:
    """The context that a message's headers carry; a missing or bad `traceparent` starts a new trace."""
    return _propagator.extract(dict(headers or {}))


def record_span(
    name: str,
    start_ns: int,
    end_ns: int | None = None,
    parent: Context | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
) -> None:
    """A span of something that is already over; times are wall-clock nanoseconds.

    Args:
        name: of the span.
        start_ns: when it began.
        end_ns: when it ended; default now.
        parent: its context; default the current one.
        attributes: facts.
    """
    span = tracer.start_span(name, context=parent, start_time=start_ns, attributes=attributes)
    span.end(end_ns or time.time_ns())
