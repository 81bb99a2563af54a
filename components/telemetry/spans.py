"""One trace per request across all processes: its spans, and its context in message headers."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from functools import lru_cache
from hashlib import blake2b
from math import inf
from random import getrandbits
from types import TracebackType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from components.errors import Cancelled, MeshError
from components.telemetry.light_span import SAMPLED, LightSpan, Step
from components.telemetry.trace_pieces import LOST
from components.token_bucket import TokenBucket

Sink = Callable[[LightSpan], None]

_propagator: Final = TraceContextTextMapPropagator()  # not the global one, which also forwards clients' baggage
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])").fullmatch

# The span of all traces that are neither exported nor held.
NOT_KEPT: Final = trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)
_IN_NOT_KEPT: Final = trace.set_span_in_context(NOT_KEPT, Context())
_IN_INVALID: Final = trace.set_span_in_context(trace.INVALID_SPAN, Context())
[_SPAN_KEY] = _IN_NOT_KEPT
_ODD: Final = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_MASK: Final = (1 << 64) - 1
_INSIDE_ALREADY: Final = nullcontext(NOT_KEPT)


class RemoteSpan(trace.NonRecordingSpan):
    """A caller's span in another process."""

    def __init__(self, trace_id: int, span_id: int, flags: int, state: TraceState | None = None) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags  # SAMPLED, or 0 while undecided
        self.state = state

    def get_span_context(self) -> trace.SpanContext:
        return trace.SpanContext(self.trace_id, self.span_id, True, trace.TraceFlags(self.flags), self.state)


class Spans(trace.Tracer):
    """A tracer that limits the number of new traces per second."""

    def __init__(self, sink: Sink | None = None, rate: TokenBucket | None = None, *, holds: bool = False) -> None:
        """`sink` gets each request's ended span with its descendants; without one, nothing is recorded.

        `holds`: also those of traces that are not sampled, without the "sampled" flag.
        """
        self._sink = sink
        self._rate = rate
        self._held = TokenBucket(inf)
        self.holds = holds

    def limit(self, rate: TokenBucket) -> None:
        self._rate = rate

    def record_to(self, sink: Sink | None, *, holds: bool, held_per_s: float = inf) -> None:
        """`held_per_s` limits held traces, whose spans cost as much as sampled ones."""
        self._sink, self.holds, self._held = sink, holds, TokenBucket(held_per_s)

    def continue_trace(self, headers: Mapping[str, str]) -> Context:
        """The context for a client's `traceparent`, which sets the trace id. Our rate limits how many are sampled."""
        context = _extracted(headers)
        of_client = trace.get_current_span(context).get_span_context()
        if not of_client.is_valid:
            return context
        if of_client.trace_flags.sampled and (self._rate is None or self._rate.take()):
            return context
        if self.holds and self._held.take():
            return _inside(RemoteSpan(of_client.trace_id, of_client.span_id, 0, of_client.trace_state or None))
        return _IN_NOT_KEPT

    def start_span(  # type: ignore[override]  # links are not recorded
        self,
        name: str,
        context: Context | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        start_time: int | None = None,
    ) -> trace.Span:
        parent = trace.get_current_span(context)
        if parent is NOT_KEPT:
            return NOT_KEPT
        if parent.__class__ is LightSpan:
            return parent.child(name, kind, attributes, start_time)
        sink = self._sink
        if sink is None:
            return parent if parent.get_span_context().trace_flags.sampled else NOT_KEPT
        if isinstance(parent, RemoteSpan):
            trace_id, parent_id, flags, state = parent.trace_id, parent.span_id, parent.flags, parent.state
            remote = True
        elif (of := parent.get_span_context()).is_valid:
            trace_id, parent_id, flags, remote = of.trace_id, of.span_id, of.trace_flags & SAMPLED, True
            state = of.trace_state or None
        else:
            trace_id, parent_id, remote, state = getrandbits(128) or 1, 0, False, None
            flags = SAMPLED if self._rate is None or self._rate.take() else 0
            if not flags and not self._held.take():
                return NOT_KEPT
        if not flags and not self.holds:
            return NOT_KEPT
        return LightSpan(name, trace_id, parent_id, flags, sink, kind, attributes, start_time, remote, state)

    def start_as_current_span(  # type: ignore[override]
        self, name: str, context: Context | None = None, **options: Any
    ) -> AbstractContextManager[trace.Span]:
        if context is None and get_current() is _IN_NOT_KEPT:
            return _INSIDE_ALREADY
        return EndingSpan(self.start_span(name, context, **options))

    def start_called_span(self, name: str, instance_id: str) -> trace.Span:
        """Start a request's span with an id that the caller can compute, to record it if this process dies."""
        span = self.start_span(name, kind=trace.SpanKind.SERVER)
        if isinstance(span, LightSpan) and span.remote:
            span.span_id = called_span_id(span.parent_id, instance_id)
        return span


class CurrentSpan:
    """Makes a span current. OpenTelemetry's `use_span` is a generator, which costs as much as the span."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def __enter__(self) -> trace.Span:
        span = self._span
        self._token: Token[Context] = attach(_IN_NOT_KEPT if span is NOT_KEPT else trace.set_span_in_context(span))
        return span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        detach(self._token)


class EndingSpan(CurrentSpan):
    """Also ends the span, and records an exception that leaves the body."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        detach(self._token)
        span = self._span
        if span is NOT_KEPT:
            return
        if isinstance(error, Exception):
            span.record_exception(error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end()


tracer: Final = Spans()


def trace_headers() -> dict[str, str] | None:
    """Return None if the trace is not recorded."""
    context = get_current()
    if context is _IN_NOT_KEPT:
        return None
    span = trace.get_current_span(context)
    if isinstance(span, LightSpan) and not span.state:
        return {"traceparent": span.traceparent()}
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier or None


def trace_context(headers: Mapping[str, str] | None) -> Context:
    """The context in a message's headers. The first process decides for all hops whether a trace is sampled.

    Without a `traceparent` nothing is recorded. A trace that is not sampled is held, if this process holds any.
    """
    if not headers or "traceparent" not in headers:
        return _IN_NOT_KEPT
    context = _extracted(headers)
    if tracer.holds:
        return context
    caller = trace.get_current_span(context)
    return _IN_NOT_KEPT if isinstance(caller, RemoteSpan) and not caller.flags else context


def _extracted(headers: Mapping[str, str]) -> Context:
    found = None if "tracestate" in headers else _TRACEPARENT(headers["traceparent"])
    if found is not None:
        trace_id, span_id, flags = found.groups()
        caller = RemoteSpan(int(trace_id, 16), int(span_id, 16), int(flags))
        return _inside(caller) if caller.trace_id and caller.span_id else _IN_INVALID
    of = trace.get_current_span(_propagator.extract(dict(headers), Context())).get_span_context()
    if not of.is_valid:
        return _IN_INVALID
    return _inside(RemoteSpan(of.trace_id, of.span_id, of.trace_flags & SAMPLED, of.trace_state or None))


def _inside(span: trace.Span) -> Context:
    return Context({_SPAN_KEY: span})


def called_span_id(caller: int, instance_id: str) -> int:
    """The id of the span that `start_called_span` makes. It differs for each pair of caller and instance."""
    return (caller ^ _number_of(instance_id)) * _ODD & _MASK or 1


@lru_cache(1024)
def _number_of(instance_id: str) -> int:
    return int.from_bytes(blake2b(instance_id.encode(), digest_size=8).digest(), "big")


def record_lost(name: str, caller: trace.Span | Step, instance_id: str, why: str) -> None:
    """Record, in place of a process that died, its span of the call from `caller`.

    Else its child spans, which other processes have exported, would have no parent.
    """
    if not isinstance(caller, LightSpan) or LOST in caller.attributes:  # once for all branches
        return
    caller.attributes[LOST] = why
    facts = {LOST: why}
    span = tracer.start_span(name, trace.set_span_in_context(caller), attributes=facts, start_time=caller.start_time)
    if isinstance(span, LightSpan):
        span.span_id = called_span_id(caller.span_id, instance_id)
    span.set_status(trace.Status(trace.StatusCode.ERROR, why))
    span.end()


def exemplar_of(span: trace.Span) -> dict[str, str] | None:
    """Labels that link a histogram's bucket to a sampled trace; else None."""
    return {"trace_id": trace.format_trace_id(span.trace_id)} if isinstance(span, LightSpan) and span.flags else None


def mark_outcome(span: trace.Span, error: MeshError) -> None:
    """Mark the span as failed, or as cancelled by the client, which is no failure."""
    if isinstance(error, Cancelled):
        span.set_attribute("kvmesh.cancelled", error.message)
    else:
        span.set_status(trace.Status(trace.StatusCode.ERROR, error.message))


class _NoStep(Step):
    """The step of an unrecorded trace."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, attributes: Mapping[str, Any]) -> None:
        pass


NO_STEP: Final = _NoStep()


def step(
    name: str, of: trace.Span | None = None, start_ns: int = 0, kind: trace.SpanKind = trace.SpanKind.INTERNAL
) -> Step:
    """A step of `of`, or of the current span."""
    span = of or trace.get_current_span()
    return Step(span, name, start_ns or time.time_ns(), kind) if span.__class__ is LightSpan else NO_STEP


def record_step(
    name: str,
    start_ns: int,
    end_ns: int = 0,
    of: trace.Span | None = None,
    attributes: Mapping[str, str | int | float] | None = None,
) -> None:
    """Record an ended step. Times are wall-clock nanoseconds."""
    span = of or trace.get_current_span()
    if span.__class__ is LightSpan:
        Step(span, name, start_ns, attributes=attributes).end(end_ns)
