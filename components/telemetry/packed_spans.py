"""The form of spans in a file, at a fifth of the cost of OTLP's, which is for other receivers.

A piece's first byte identifies its form.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from opentelemetry.trace import StatusCode

from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import encode_whole

MAX_BYTES: Final = 32_768  # per root; a larger piece becomes OTLP, which cuts clients' long texts
PACKED_FIRST: Final = b"\x90"  # lowest first byte of a msgpack array; OTLP's is lower

PackedEvent = tuple[str, int, dict[str, Any]]  # name, wall-clock nanoseconds, attributes


class PackedSpan(msgspec.Struct, frozen=True, array_like=True):
    span_id: int
    parent_id: int  # 0: none
    name: str
    start_ns: int  # wall clock
    end_ns: int
    status: int  # OpenTelemetry's StatusCode
    error: str
    attributes: dict[str, Any]
    events: list[PackedEvent]


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=str)
_decoder: Final = msgspec.msgpack.Decoder(list[PackedSpan])


def pack_spans(roots: Sequence[LightSpan]) -> tuple[int, bytes]:
    """The number of spans and their bytes. `roots`: spans of one trace, with their descendants."""
    fields: list[tuple[Any, ...]] = []
    for root in roots:
        _add(root, fields)
    try:
        data = _encoder.encode(fields)
    except (OverflowError, UnicodeEncodeError):  # unrepresentable in msgpack
        data = b""
    if not 0 < len(data) <= MAX_BYTES * len(roots):
        data = b"".join([encode_whole(root) for root in roots])
    return len(fields), data


def _add(span: LightSpan, fields: list[tuple[Any, ...]]) -> None:
    parent_id = span.span_id
    for step in span.steps:
        if isinstance(step, LightSpan):
            _add(step, fields)
        else:
            status = 2 if step.error else 0
            times = step.start_time, step.end_time
            fields.append((step.span_id, parent_id, step.name, *times, status, step.error, step.attributes, ()))
    code = span.status.status_code
    status, error = (0, "") if code is StatusCode.UNSET else (code.value, span.status.description or "")
    times = span.start_time, span.end_time or 0
    fields.append((parent_id, span.parent_id, span.name, *times, status, error, span.attributes, span.events))


def unpack_spans(data: bytes) -> list[PackedSpan]:
    """Raises: msgspec.DecodeError."""
    return _decoder.decode(data)
