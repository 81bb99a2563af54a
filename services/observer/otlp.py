"""Converts OTLP requests to pieces for the trace store."""

import json
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from components.errors import Rejected
from components.telemetry.otlp_encoder import span_field
from components.telemetry.stored_spans import plain
from components.telemetry.trace_pieces import LATEST_NS, PIECES, REQUEST_ID, Piece, Root, unpack_pieces

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
GZIP: Final = 31  # zlib's window bits for gzip
IDS: Final = ("traceId", "spanId", "parentSpanId")  # hex in OTLP's JSON, unlike protobuf's
ANONYMOUS: Final = "unknown"
ROOT: Final = REQUEST_ID.encode()


class TooLarge(Rejected):
    """The body exceeds the limit."""


@dataclass(frozen=True, slots=True)
class Received:
    by_service: Mapping[str, list[Piece]] = field(default_factory=dict)
    rejected: int = 0  # spans without valid ids or times


def unzipped(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Raises: Rejected, TooLarge."""
    if encoding in {"", "identity"}:
        return body
    if encoding != "gzip":
        raise Rejected(f"content-encoding {encoding!r} is not supported: send gzip, or none")
    unzip = zlib.decompressobj(GZIP)
    try:
        data = unzip.decompress(body, most_bytes + 1)
    except zlib.error as exc:
        raise Rejected(f"the body is not gzip: {exc}") from exc
    if len(data) > most_bytes:
        raise TooLarge(f"the body exceeds {most_bytes} bytes after decompression")
    if not unzip.eof:
        raise Rejected("the gzip of the body is truncated: its end is missing")
    if unzip.unused_data:
        raise Rejected("the body has more than one gzip member: send one")
    return data


def read_request(body: bytes, content_type: str) -> Received:
    """Raises: Rejected, with the fault."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == PIECES:
        try:
            ours = unpack_pieces(body)
        except msgspec.DecodeError as exc:
            raise Rejected(f"the body is not {PIECES}: {exc}") from exc
        return Received({ours.service: ours.pieces})
    if kind == JSON:
        request = _from_json(body)
    elif kind == PROTOBUF:
        try:
            request = ExportTraceServiceRequest.FromString(body)
        except DecodeError as exc:
            raise Rejected("the body is not an ExportTraceServiceRequest of OTLP") from exc
    else:
        raise Rejected(f"content-type {kind!r} is not supported: send {PROTOBUF} or {JSON}")
    by_service: dict[str, list[Piece]] = defaultdict(list)
    rejected = 0
    for resource in request.resource_spans:
        service = _service(resource.resource.attributes)
        for scope in resource.scope_spans:
            pieces, bad = _pieces(scope)
            by_service[service] += pieces
            rejected += bad
    return Received(by_service, rejected)


def _pieces(scope: trace_pb2.ScopeSpans) -> tuple[list[Piece], int]:
    """Return the pieces, and the number of invalid spans."""
    by_trace: dict[bytes, list[trace_pb2.Span]] = defaultdict(list)
    for span in filter(_is_valid, scope.spans):
        by_trace[span.trace_id].append(span)
    pieces = [
        _piece(id_, found, b"".join([span_field(span.SerializeToString()) for span in found]))
        for id_, found in by_trace.items()
    ]
    return pieces, len(scope.spans) - sum(piece.num_spans for piece in pieces)


def _is_valid(span: trace_pb2.Span) -> bool:
    return len(span.span_id) == 8 and len(span.trace_id) == 16 and span.end_time_unix_nano > 0


def _piece(trace_id: bytes, spans: Sequence[trace_pb2.Span], data: bytes) -> Piece:
    roots = [root for span in spans if (root := _root(span)) is not None] if ROOT in data else []
    start_ns = min(span.start_time_unix_nano for span in spans)
    return Piece(trace_id.hex(), min(start_ns, LATEST_NS), len(spans), data, roots)


def _root(span: trace_pb2.Span) -> Root | None:
    if span.kind != trace_pb2.Span.SPAN_KIND_SERVER:
        return None
    attributes = {attribute.key: plain(attribute.value) for attribute in span.attributes}
    if REQUEST_ID not in attributes:
        return None
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Root.of(min(span.start_time_unix_nano, LATEST_NS), attributes, failed=failed)


def _service(attributes: Iterable[KeyValue]) -> str:
    """Return the service's name; for kvmesh processes `decode-<instance id>`, as in their own file."""
    facts = {attribute.key: attribute.value.string_value for attribute in attributes}
    name = facts.get("service.name") or ANONYMOUS
    instance = facts.get("service.instance.id")
    return f"{name.removeprefix('kvmesh-')}-{instance}" if name.startswith("kvmesh-") and instance else name


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    try:
        fields = json.loads(body)
        for span in _spans_of(fields):
            for name in IDS:
                if name in span:
                    span[name] = b64encode(bytes.fromhex(span[name])).decode()
        ParseDict(fields, request, ignore_unknown_fields=True)
    except (ParseError, ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise Rejected(f"the body is not valid OTLP JSON: {exc}") from exc
    return request


def _spans_of(fields: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for resource in fields.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())
