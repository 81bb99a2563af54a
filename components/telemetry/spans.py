"""Spans: one trace per request across all processes, kept on disk and exported over OTLP when an endpoint is set."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from importlib import import_module
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
from components.telemetry.trace_rate import TraceRate
from components.telemetry.trace_store import TraceStoreExporter

_propagator: Final = TraceContextTextMapPropagator()  # not the global one: a stranger's baggage stays outside

OTLP: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # imported where there is a collector: 60 ms
OTLP_TIMEOUT_S: Final = 2  # a collector that is away must not hold up a stop
EXPORT_EVERY_MS: Final = 300  # soon enough that `inspect trace last` shows the request just made

# Stands for each span of all traces that are not kept. Where only some requests are traced, spans of the others would take 7 us
# each for ids and contexts that nobody gets, and their headers as much at each hop: so they have none.
NOT_KEPT: Final = trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)
_IN_NOT_KEPT: Final = trace.set_span_in_context(NOT_KEPT, Context())
_INSIDE_ALREADY: Final = nullcontext(NOT_KEPT)


class Spans:
    """OpenTelemetry's tracer, except that at most so many traces begin in a second, and that below others nothing is made."""

    def __init__(self, inner: trace.Tracer, rate: TraceRate | None = None) -> None:
        """Without `rate` all are kept."""
        self._inner = inner
        self._rate = rate

    def limit(self, rate: TraceRate) -> None:
        """Keep no more than these from now on."""
        self._rate = rate

    def continue_trace(self, headers: Mapping[str, str]) -> Context:
        """The context of a client's `traceparent`. A client chooses the trace of its request; the rate, whether it is kept."""
        context = trace_context(headers)
        of_client = trace.get_current_span(context).get_span_context()
        if of_client.is_valid and self._rate is not None and not self._rate.take():
            return _IN_NOT_KEPT
        return context

    def start_span(self, name: str, context: Context | None = None, **options: Any) -> trace.Span:
        """A span below the current one, or that of `context`."""
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
        """The same, as the current span for the time of the block."""
        if context is None and get_current() is _IN_NOT_KEPT:  # it is current already: nothing to enter
            return _INSIDE_ALREADY
        span = self.start_span(name, context, **options)
        how = {"record_exception": record_exception, "set_status_on_exception": set_status_on_exception}
        return use_span(span, end_on_exit=True, **how)


def use_span(span: trace.Span, **how: bool) -> AbstractContextManager[trace.Span]:
    """`span` is the current one for the time of the block; `how`: see OpenTelemetry's function of that name."""
    return _InNotKept() if span is NOT_KEPT else trace.use_span(span, **how)


class _InNotKept:
    """Within it the current span is `NOT_KEPT`."""

    __slots__ = ("_token",)

    def __enter__(self) -> trace.Span:
        self._token = attach(_IN_NOT_KEPT)
        return NOT_KEPT

    def __exit__(self, *_: object) -> None:
        detach(self._token)


tracer: Final = Spans(trace.get_tracer("kvmesh"))


@asynccontextmanager
async def start_telemetry(settings: MeshSettings, role: str, instance_id: str) -> AsyncIterator[None]:
    """Logs and spans of this process; leaving it writes what is still queued."""
    configure_logs(settings.log_level, settings.log_format)
    name = f"{role}-{instance_id}"
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"kvmesh-{role}", "service.instance.id": instance_id}),
        sampler=ParentBased(ALWAYS_ON),  # which traces begin is for `Spans` to say
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
    """`traceparent` of the current span, for the headers of a message; None where there is no span, or none that is kept."""
    if get_current() is _IN_NOT_KEPT:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier or None


def trace_context(headers: Mapping[str, str] | None) -> Context:
    """The context that a message's headers carry. Without `traceparent`, or with one that is not sampled, nothing is kept
    in it; with a bad one it has no span.

    So the process that a request enters first decides for all of its hops.
    """
    if not headers or "traceparent" not in headers:
        return _IN_NOT_KEPT
    context = _propagator.extract(dict(headers))
    of_caller = trace.get_current_span(context).get_span_context()
    return _IN_NOT_KEPT if of_caller.is_valid and not of_caller.trace_flags.sampled else context


def mark_outcome(span: trace.Span, error: MeshError) -> None:
    """Show on a span why its work ended early. A client that has gone is no failure."""
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
    """A span of something that is already over; times are wall-clock nanoseconds.

    Args:
        name: of the span.
        start_ns: when it began.
        end_ns: when it ended; default now.
        parent: default the current one.
        attributes: facts.
    """
    parent = parent or trace.get_current_span()
    if parent is NOT_KEPT:
        return
    span = tracer.start_span(name, trace.set_span_in_context(parent), start_time=start_ns, attributes=attributes)
    span.end(end_ns or time.time_ns())
