"""One trace per request across all processes, on disk and optionally over OTLP."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from importlib import import_module
from math import isinf
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from components.errors import Cancelled, MeshError
from components.settings import MeshSettings
from components.telemetry.logs import configure_logs
from components.telemetry.trace_store import TraceStoreExporter

_propagator: Final = TraceContextTextMapPropagator()  # not the global one, which also forwards clients' baggage

OTLP: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # imported only with a collector: 60 ms
OTLP_TIMEOUT_S: Final = 2  # an unreachable collector must not delay a stop
EXPORT_EVERY_MS: Final = 300  # so that `inspect trace last` shows the latest request

# The span of all traces that are not kept: real spans cost 7 us each, and as much per hop.
NOT_KEPT: Final = trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)
_IN_NOT_KEPT: Final = trace.set_span_in_context(NOT_KEPT, Context())
_INSIDE_ALREADY: Final = nullcontext(NOT_KEPT)
BURST_S: Final = 10.0  # of idle time, at most


class TraceRate:
    """At most `per_s` new traces a second on average; infinity: all.

    Spans of every request cost a quarter of the mesh's processor time.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = self._most = max(1.0, per_s * BURST_S) if per_s else 0.0
        self._at = clock()

    def take(self) -> bool:
        if isinf(self._per_s):
            return True
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Spans:
    """OpenTelemetry's tracer, with a limit of new traces a second."""

    def __init__(self, inner: trace.Tracer, rate: TraceRate | None = None) -> None:
        self._inner = inner
        self._rate = rate

    def limit(self, rate: TraceRate) -> None:
        self._rate = rate

    def continue_trace(self, headers: Mapping[str, str]) -> Context:
        """The client's `traceparent` sets the trace id. Our rate decides whether the trace is kept."""
        context = trace_context(headers)
        of_client = trace.get_current_span(context).get_span_context()
        if of_client.is_valid and self._rate is not None and not self._rate.take():
            return _IN_NOT_KEPT
        return context

    def start_span(self, name: str, context: Context | None = None, **options: Any) -> trace.Span:
        parent = trace.get_current_span(context)
        if parent is NOT_KEPT or (parent is trace.INVALID_SPAN and self._rate is not None and not self._rate.take()):
            return NOT_KEPT
        span = self._inner.start_span(name, context, **options)
        return span if span.get_span_context().trace_flags.sampled else NOT_KEPT

    def start_as_current_span(
        self,
        name: str,
        context: Context | None = None,
        *,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        **options: Any,
    ) -> AbstractContextManager[trace.Span]:
        if context is None and get_current() is _IN_NOT_KEPT:  # it is current already
            return _INSIDE_ALREADY
        span = self.start_span(name, context, **options)
        how = {"record_exception": record_exception, "set_status_on_exception": set_status_on_exception}
        return use_span(span, end_on_exit=True, **how)


def use_span(span: trace.Span, **how: bool) -> AbstractContextManager[trace.Span]:
    return _InNotKept() if span is NOT_KEPT else trace.use_span(span, **how)


class _InNotKept:
    __slots__ = ("_token",)

    def __enter__(self) -> trace.Span:
        self._token = attach(_IN_NOT_KEPT)
        return NOT_KEPT

    def __exit__(self, *_: object) -> None:
        detach(self._token)


tracer: Final = Spans(trace.get_tracer("kvmesh"))


@asynccontextmanager
async def start_telemetry(settings: MeshSettings, role: str, instance_id: str) -> AsyncIterator[None]:
    configure_logs(settings.log_level, settings.log_format)
    name = f"{role}-{instance_id}"
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"kvmesh-{role}", "service.instance.id": instance_id}),
        sampler=ParentBased(ALWAYS_ON),  # `Spans` decides which traces begin
    )
    kept = TraceStoreExporter(settings.home, name)
    provider.add_span_processor(BatchSpanProcessor(kept, max_queue_size=16384, schedule_delay_millis=EXPORT_EVERY_MS))
    if settings.otlp_endpoint:
        endpoint = f"{settings.otlp_endpoint.rstrip('/')}/v1/traces"
        otlp: SpanExporter = import_module(OTLP).OTLPSpanExporter(endpoint=endpoint, timeout=OTLP_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(otlp))
    trace.set_tracer_provider(provider)
    tracer.limit(TraceRate(settings.traces_per_s))
    try:
        yield
    finally:
        provider.shutdown()


def trace_headers() -> dict[str, str] | None:
    """`traceparent` of the current span; None if it is not kept."""
    if get_current() is _IN_NOT_KEPT:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier or None


def trace_context(headers: Mapping[str, str] | None) -> Context:
    """The context in a message's headers. The first process decides for all hops: without a sampled `traceparent` no
    span is kept.
    """
    if not headers or "traceparent" not in headers:
        return _IN_NOT_KEPT
    context = _propagator.extract(dict(headers))
    of_caller = trace.get_current_span(context).get_span_context()
    return _IN_NOT_KEPT if of_caller.is_valid and not of_caller.trace_flags.sampled else context


def mark_outcome(span: trace.Span, error: MeshError) -> None:
    """A client that left is no failure."""
    if isinstance(error, Cancelled):
        span.set_attribute("kvmesh.cancelled", error.message)
    else:
        span.set_status(trace.Status(trace.StatusCode.ERROR, error.message))


def record_span(
    name: str,
    start_ns: int,
    end_ns: int | None = None,
    parent: trace.Span | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
) -> None:
    """Record a span that is over; times are wall-clock nanoseconds."""
    parent = parent or trace.get_current_span()
    if parent is NOT_KEPT:
        return
    span = tracer.start_span(name, trace.set_span_in_context(parent), start_time=start_ns, attributes=attributes)
    span.end(end_ns or time.time_ns())
