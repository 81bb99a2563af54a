"""Spans: one trace per request across all processes, kept on disk and exported over OTLP when an endpoint is set."""

import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from components.settings import MeshSettings
from components.telemetry.logs import configure_logs
from components.telemetry.sampler import RateSampler
from components.telemetry.trace_store import TraceStoreExporter

_propagator: Final = TraceContextTextMapPropagator()  # not the global one: a stranger's baggage stays outside
_NOT_KEPT: Final = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-00")

OTLP: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # imported where there is a collector: 60 ms
OTLP_TIMEOUT_S: Final = 2  # a collector that is away must not hold up a stop
EXPORT_EVERY_MS: Final = 300  # soon enough that `inspect trace last` shows the request just made


class Dropped(trace.NonRecordingSpan):
    """Stands for each span of a trace that is not kept, and goes on to other processes as it came.

    Where only some requests are traced, spans of the others would take 7 us each for ids and contexts that nobody gets.
    """

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers  # `traceparent`, and `tracestate` if there is one

    @cached_property
    def _context(self) -> trace.SpanContext:  # type: ignore[override]  # made when somebody asks
        return trace.get_current_span(_propagator.extract(self.headers)).get_span_context()


class Spans:
    """OpenTelemetry's tracer, except that below a span that is not kept nothing is made."""

    def __init__(self, inner: trace.Tracer) -> None:
        self._inner = inner

    def start_span(self, name: str, context: Context | None = None, **options: Any) -> trace.Span:
        """A span below the current one, or that of `context`."""
        parent = trace.get_current_span(context)
        if isinstance(parent, Dropped):
            return parent
        span = self._inner.start_span(name, context, **options)
        return span if span.is_recording() else _dropped(trace.set_span_in_context(span, Context()))

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
        span = self.start_span(name, context, **options)
        if span is trace.get_current_span():
            return nullcontext(span)
        how = {"record_exception": record_exception, "set_status_on_exception": set_status_on_exception}
        return use_span(span, end_on_exit=True, **how)


def use_span(span: trace.Span, **how: bool) -> AbstractContextManager[trace.Span]:
    """`span` is the current one for the time of the block; `how`: see OpenTelemetry's function of that name."""
    return _Current(span) if isinstance(span, Dropped) else trace.use_span(span, **how)


class _Current:
    """Of one that does not end."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def __enter__(self) -> trace.Span:
        self._token = attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(self, *_: object) -> None:
        detach(self._token)


def _dropped(context: Context) -> Dropped:
    """What stands for the span of `context`."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context)
    return Dropped(headers)


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
    """`traceparent` of the current span, for the headers of a message. To be read, not changed."""
    span = trace.get_current_span()
    if isinstance(span, Dropped):
        return span.headers
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier


def trace_context(headers: Mapping[str, str] | None) -> Context:
    """The context that a message's headers carry; with a missing or bad `traceparent` it has no span."""
    if headers is None:
        return Context()
    parent = headers.get("traceparent", "")
    if _NOT_KEPT.fullmatch(parent) and "tracestate" not in headers:  # most, where requests are many
        return trace.set_span_in_context(Dropped({"traceparent": parent}), Context())
    context = _propagator.extract(dict(headers))
    of_caller = trace.get_current_span(context).get_span_context()
    if of_caller.is_valid and not of_caller.trace_flags.sampled:
        return trace.set_span_in_context(_dropped(context), Context())
    return context


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
    if isinstance(parent, Dropped):
        return
    span = tracer.start_span(name, trace.set_span_in_context(parent), start_time=start_ns, attributes=attributes)
    span.end(end_ns or time.time_ns())
