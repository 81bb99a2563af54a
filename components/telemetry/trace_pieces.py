"""Encoded spans of a trace, which a process writes to its file or sends to the observer, which need not parse them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

REQUEST_ID: Final = "kvmesh.request_id"
CLIENT_REQUEST_ID: Final = "kvmesh.client_request_id"
ROUTE: Final = "http.route"
SLOW: Final = "kvmesh.slow"
MOVED: Final = "kvmesh.moved"
LOST: Final = "kvmesh.lost"  # of a dead process's span, which its caller recorded
TTFT: Final = "kvmesh.ttft_s"
REFUSED: Final = "kvmesh.refused"  # reason of a 4xx answer; may quote the client's data
TENANT: Final = "kvmesh.tenant"

PIECES: Final = "application/x-kvmesh-pieces"  # content type, listed in an observer's `Accept-Post`
LATEST_NS: Final = (1 << 63) - 1  # SQLite has no larger integers

TraceId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Nanoseconds = Annotated[int, Meta(ge=0, le=LATEST_NS)]  # wall clock


class Root(msgspec.Struct, frozen=True, array_like=True):
    """A request's root span, for the index."""

    start_ns: Nanoseconds
    failed: bool
    request_id: str
    client_request_id: str | None
    slow: bool
    moved: bool
    tenant: str | None = None

    @classmethod
    def of(cls, start_ns: int, attributes: Mapping[str, Any], *, failed: bool) -> "Root":
        """`attributes`: the span's, among them REQUEST_ID."""

        def text(name: str) -> str | None:
            value = attributes.get(name)
            return None if value is None else str(value)

        return cls(
            start_ns,
            failed,
            str(attributes[REQUEST_ID]),
            text(CLIENT_REQUEST_ID),
            SLOW in attributes,
            MOVED in attributes,
            text(TENANT),
        )


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Spans of one trace, exported together."""

    trace_id: TraceId
    start_ns: Nanoseconds
    num_spans: Annotated[int, Meta(ge=1)]
    spans: bytes  # packed, or elements of OTLP's `ScopeSpans.spans` with their tags
    roots: Sequence[Root] = ()


class Pieces(msgspec.Struct, frozen=True, array_like=True):
    service: str  # role and instance id
    pieces: list[Piece]


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Pieces)
_batch_decoder: Final = msgspec.msgpack.Decoder(list[Piece])


def pack_pieces(pieces: Pieces) -> bytes:
    return _encode(pieces)


def unpack_pieces(body: bytes) -> Pieces:
    """Raises: msgspec.ValidationError, msgspec.DecodeError."""
    return _decoder.decode(body)


def pack_batch(pieces: Sequence[Piece]) -> bytes:
    return _encode(pieces)


def unpack_batch(data: bytes) -> list[Piece]:
    """Raises: msgspec.ValidationError, msgspec.DecodeError."""
    return _batch_decoder.decode(data)
