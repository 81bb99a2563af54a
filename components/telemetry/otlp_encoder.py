"""Encodes spans as OTLP's protobuf messages, in a tenth of the SDK's time.

Source: opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto. A test decodes the bytes with opentelemetry-proto.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final

from opentelemetry.trace import StatusCode

from components.telemetry.light_span import LightSpan, SpanEvent, Step

ATTRIBUTE_CHARS: Final = 8192  # longer texts are cut, because some attributes hold clients' data
NAMES: Final = 4096  # distinct names and keys whose bytes are kept

# A tag is (field number << 3) | wire type; wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
_START_AND_END: Final = Struct("<BQBQ").pack  # fields 7 and 8 of Span
_START_TAG, _END_TAG = 0x39, 0x41
_EVENT_TIME: Final = Struct("<BQ").pack  # field 1 of Event
_DOUBLE: Final = Struct("<d").pack
# Field 16 of Span. Bit 8: it is known whether the parent is remote; bit 9: it is.
_LOCAL_PARENT: Final = b"\x85\x01\x00\x01\x00\x00"
_REMOTE_PARENT: Final = b"\x85\x01\x00\x03\x00\x00"
_LENGTHS: Final = [bytes([n]) for n in range(128)]  # varints of one byte
_MASK: Final = (1 << 64) - 1
SCOPE: Final = b"\x0a\x08\x0a\x06kvmesh"  # field 1 of ScopeSpans: an InstrumentationScope


def encode_whole(span: LightSpan) -> bytes:
    """A span and its descendants as elements of `ScopeSpans.spans`."""
    return b"".join([span_field(encode_span(each)) for each in span.whole()])


def encode_span(span: LightSpan | Step) -> bytes:
    """The fields of a `Span`."""
    parts = [
        b"\x0a\x10",
        span.trace_id.to_bytes(16, "big"),
        b"\x12\x08",
        span.span_id.to_bytes(8, "big"),
    ]
    if span.state:
        parts.append(_text(0x1A, span.state.to_header()))
    if span.parent_id:
        parts += (b"\x22\x08", span.parent_id.to_bytes(8, "big"))
    parts.append(_name(span.name, span.kind.value + 1))
    parts.append(_START_AND_END(_START_TAG, span.start_time, _END_TAG, span.end_time or 0))
    for key, value in span.attributes.items():
        if value.__class__ is str and len(value) < 100 and value.isascii():  # the common case, inlined for speed
            value_bytes = value.encode()
            size = len(value_bytes)
            head = _key(key)
            parts += (
                b"\x4a",
                _varint(len(head) + size + 4),
                head,
                b"\x12",
                _LENGTHS[size + 2],
                b"\x0a",
                _LENGTHS[size],
                value_bytes,
            )
        else:
            parts.append(_attribute(b"\x4a", key, value))
    parts += [_event(event) for event in span.events]
    if span.status.status_code is not StatusCode.UNSET:
        parts.append(_status(span.status.status_code, span.status.description))
    parts.append(_REMOTE_PARENT if span.remote else _LOCAL_PARENT)
    return b"".join(parts)


def span_field(encoded: bytes) -> bytes:
    """An element of `ScopeSpans.spans`. Such elements can be concatenated."""
    return b"\x12" + _varint(len(encoded)) + encoded


def encode_resource(attributes: Mapping[str, Any]) -> bytes:
    """The fields of a `Resource`."""
    return b"".join(_attribute(b"\x0a", key, value) for key, value in attributes.items())


def encode_request(resource: bytes, pieces: Iterable[bytes]) -> bytes:
    """An `ExportTraceServiceRequest`. Each of `pieces`, joined `span_field`s, becomes a `ScopeSpans`."""
    scopes = b"".join([_field(b"\x12", SCOPE + spans) for spans in pieces])
    return _field(b"\x0a", _field(b"\x0a", resource) + scopes)


def _varint(number: int) -> bytes:
    if number < 128:
        return _LENGTHS[number]
    made = bytearray()
    while number > 127:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + _varint(len(data)) + data


@lru_cache(NAMES)
def _text(tag: int, text: str) -> bytes:
    return _field(bytes([tag]), text.encode(errors="replace"))


@lru_cache(NAMES)
def _name(name: str, kind: int) -> bytes:
    """Fields 5 and 6 of `Span`."""
    return _field(b"\x2a", name[:ATTRIBUTE_CHARS].encode(errors="replace")) + b"\x30" + _LENGTHS[kind]


@lru_cache(NAMES)
def _key(key: str) -> bytes:
    """Field 1 of `KeyValue`."""
    return _field(b"\x0a", key.encode(errors="replace"))


def _attribute(tag: bytes, key: str, value: Any) -> bytes:
    return _field(tag, _key(key) + _field(b"\x12", _value(value)))


def _value(value: Any) -> bytes:
    """The fields of an `AnyValue`. Types that OTLP lacks become text."""
    if isinstance(value, str):
        return _field(b"\x0a", value[:ATTRIBUTE_CHARS].encode(errors="replace"))
    if isinstance(value, bool | int) and -(1 << 63) <= value < 1 << 63:
        return (b"\x10" if isinstance(value, bool) else b"\x18") + _varint(value & _MASK)
    if isinstance(value, float):
        return b"\x21" + _DOUBLE(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        items = b"".join(_field(b"\x0a", _value(item)) for item in value)
        # a longer list becomes text, which is cut
        return _field(b"\x2a", items) if len(items) <= ATTRIBUTE_CHARS else _value(json.dumps(value, default=str))
    return _value(str(value))


def _event(event: SpanEvent) -> bytes:
    attributes = b"".join(_attribute(b"\x1a", key, value) for key, value in event.attributes.items())
    return _field(b"\x5a", _EVENT_TIME(0x09, event.timestamp) + _text(0x12, event.name) + attributes)


def _status(code: StatusCode, description: str | None) -> bytes:
    message = _field(b"\x12", description[:ATTRIBUTE_CHARS].encode(errors="replace")) if description else b""
    return _field(b"\x7a", message + b"\x18" + _LENGTHS[code.value])
