"""Stored spans in the form for readers, and their decoding."""

import logging
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from components.telemetry.packed_spans import PACKED_FIRST, PackedSpan, unpack_spans

log = logging.getLogger(__name__)

STATUS: Final = ("UNSET", "OK", "ERROR")


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    at_ns: int  # wall clock
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are wall-clock nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str | None
    service: str
    name: str
    start_ns: int
    end_ns: int
    status: str  # UNSET, OK or ERROR
    attributes: dict[str, Any]
    error: str = ""
    events: tuple[Event, ...] = ()


def read_piece(trace_id: str, service: str, data: bytes) -> list[Span]:
    """The spans of a piece, packed or in OTLP's form; none if unreadable."""
    try:
        if data[:1] >= PACKED_FIRST:
            return [_unpacked(trace_id, service, span) for span in unpack_spans(data)]
        return decode_spans(service, data)
    except (DecodeError, msgspec.DecodeError):
        log.warning("unreadable spans were skipped", extra={"service": service, "trace_id": trace_id})
        return []


def _unpacked(trace_id: str, service: str, span: PackedSpan) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=f"{span.span_id:016x}",
        parent_id=f"{span.parent_id:016x}" if span.parent_id else None,
        service=service,
        name=span.name,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=STATUS[span.status] if 0 <= span.status < len(STATUS) else "UNSET",
        attributes=span.attributes,
        error=span.error,
        events=tuple(Event(*event) for event in span.events),
    )


def decode_spans(service: str, data: bytes) -> list[Span]:
    """`data`: elements of OTLP's `ScopeSpans.spans`."""
    return [_decoded(service, span) for span in trace_pb2.ScopeSpans.FromString(data).spans]


def _decoded(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        service=service,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=STATUS[span.status.code] if span.status.code < len(STATUS) else "UNSET",
        attributes={attribute.key: plain(attribute.value) for attribute in span.attributes},
        error=span.status.message,
        events=tuple(
            Event(event.name, event.time_unix_nano, {a.key: plain(a.value) for a in event.attributes})
            for event in span.events
        ),
    )


def plain(value: AnyValue) -> Any:
    """Convert an OTLP value to JSON's types."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: plain(item.value) for item in value.kvlist_value.values}
    found = getattr(value, kind)
    return found.hex() if isinstance(found, bytes) else found
