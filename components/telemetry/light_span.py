"""A span with OpenTelemetry's API that costs a tenth of the SDK's: no locks, no copies, no limits before the export.

It has the fields of the SDK's `ReadableSpan`, so that the SDK's exporters take it.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from random import getrandbits  # reseeded after a fork
from time import time_ns
from typing import Any, Final, NamedTuple

from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

UNSET: Final = Status()
NO_EVENTS: Final[tuple["SpanEvent", ...]] = ()
SAMPLED: Final = 1


class SpanEvent(NamedTuple):
    name: str
    timestamp: int  # wall-clock nanoseconds
    attributes: Mapping[str, Any]


class LightSpan(Span):
    __slots__ = (
        "attributes",
        "end_time",
        "events",
        "flags",
        "kind",
        "name",
        "parent_id",
        "reached",
        "remote",
        "root_id",
        "sink",
        "span_id",
        "start_time",
        "state",
        "status",
        "trace_id",
    )

    def __init__(  # noqa: PLR0917 - keywords cost time
        self,
        name: str,
        trace_id: int,
        parent_id: int,  # 0: none
        flags: int,  # SAMPLED, or 0 while it is not decided
        sink: "Callable[[LightSpan], None]",
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        start_time: int | None = None,  # wall-clock nanoseconds
        remote: bool = False,  # whether the parent is in another process
        state: TraceState | None = None,
        root_id: int = 0,
    ) -> None:
        self.name = name
        self.trace_id = trace_id
        self.span_id = getrandbits(64) or 1
        self.root_id = root_id or self.span_id  # of this process's part of the request: its first span
        self.parent_id = parent_id
        self.flags = flags
        self.sink = sink
        self.kind = kind
        self.attributes: dict[str, Any] = {} if attributes is None else dict(attributes)
        self.start_time = start_time or time_ns()
        self.end_time: int | None = None
        self.remote = remote
        self.reached = self.start_time  # end of the latest of its phases, wall-clock nanoseconds
        self.state = state
        self.status = UNSET
        self.events: Sequence[SpanEvent] = NO_EVENTS

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        start_time: int | None = None,
    ) -> "LightSpan":
        return LightSpan(
            name,
            self.trace_id,
            self.span_id,
            self.flags,
            self.sink,
            kind,
            attributes,
            start_time,
            False,
            self.state,
            self.root_id,
        )

    def end(self, end_time: int | None = None) -> None:
        if self.end_time is None:
            self.end_time = end_time or time_ns()
            self.sink(self)

    def is_recording(self) -> bool:
        return self.end_time is None

    def get_span_context(self) -> SpanContext:
        return SpanContext(self.trace_id, self.span_id, is_remote=False, **self._flags_and_state())

    @property
    def context(self) -> SpanContext:
        return self.get_span_context()

    @property
    def parent(self) -> SpanContext | None:
        if not self.parent_id:
            return None
        return SpanContext(self.trace_id, self.parent_id, is_remote=self.remote, **self._flags_and_state())

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self.end_time is None:
            self.attributes[key] = value if type(value) is not list else tuple(value)

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, timestamp: int | None = None
    ) -> None:
        if self.end_time is None:
            self.events = (*self.events, SpanEvent(name, timestamp or time_ns(), dict(attributes or {})))

    def update_name(self, name: str) -> None:
        if self.end_time is None:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """A status of OK is final, and UNSET changes nothing, as the API asks."""
        given = status if isinstance(status, Status) else Status(status, description)
        if self.end_time is None and not given.is_unset and self.status.status_code is not StatusCode.OK:
            self.status = given

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        facts: dict[str, AttributeValue] = {
            "exception.type": type(exception).__qualname__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**facts, **(attributes or {})}, timestamp)

    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-0{self.flags}"

    def _flags_and_state(self) -> dict[str, Any]:
        return {"trace_flags": TraceFlags(self.flags), "trace_state": self.state}
