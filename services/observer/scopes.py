"""Finds the spans of each trace in a request, without objects for them.

Our own senders put each trace into a `ScopeSpans` of its own, and the trace id first into each span, as all known senders
do. Whatever looks otherwise is read in full instead.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

SPAN_TAG: Final = 0x12  # field 2 of ScopeSpans
SCOPE_TAG: Final = 0x0A
TRACE_ID: Final = b"\x0a\x10"  # tag and length
SPAN_ID: Final = b"\x12\x08"
START_TAG: Final = 0x39
END_TAG: Final = 0x41
SKIPPED: Final = {0x1A, 0x22, 0x2A}  # trace state, parent, name: length and bytes
KIND_TAG: Final = 0x30


class Scope(NamedTuple):
    trace_id: bytes
    start_ns: int  # of its first span
    num_spans: int


class Unusual(Exception):
    """Read the request in full."""


def scan_scope(data: bytes) -> Scope:
    """`data`: a valid `ScopeSpans` message. Raises: Unusual, unless all its spans are of one trace."""
    trace_id, start_ns, count, at, size = b"", 0, 0, 0, len(data)
    while at < size:
        tag = data[at]
        length, at = _varint(data, at + 1)
        if tag == SPAN_TAG:
            found = data[at + 2 : at + 18]
            if data[at : at + 2] != TRACE_ID or data[at + 18 : at + 20] != SPAN_ID or (count and found != trace_id):
                raise Unusual
            if not count:
                trace_id, start_ns = found, _start(data, at + 28, at + length)
            count += 1
        elif tag != SCOPE_TAG:
            raise Unusual
        at += length
    if not count:
        raise Unusual
    return Scope(trace_id, start_ns, count)


def _start(data: bytes, at: int, end: int) -> int:
    """`at`: behind the ids. A span without an end is unusual, too."""
    for tag, place in _fields(data, at, end):
        if tag == START_TAG:
            if data[place + 8] != END_TAG:
                raise Unusual
            return int.from_bytes(data[place : place + 8], "little")
    raise Unusual


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    while at + 17 < end:
        tag = data[at]
        yield tag, at + 1
        if tag == KIND_TAG:
            at += 2
        elif tag in SKIPPED:
            length, at = _varint(data, at + 1)
            at += length
        else:
            raise Unusual


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and the place behind it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
