"""OTLP requests to spans as the trace store writes them."""

import json
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from components.errors import Rejected
from components.telemetry.otlp_encoder import span_field
from components.telemetry.trace_store import EncodedSpan, plain

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
GZIP: Final = 31  # zlib's window bits for gzip
IDS: Final = ("traceId", "spanId", "parentSpanId")  # hex in OTLP's JSON, unlike protobuf's
ANONYMOUS: Final = "unknown"


class TooLarge(Rejected):
    """The body exceeds the limit."""


@dataclass(frozen=True, slots=True)
class Received:
    by_service: Mapping[str, list[EncodedSpan]] = field(default_factory=dict)
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
        raise Rejected(f"the body is no gzip: {exc}") from exc
    if len(data) > most_bytes:
        raise TooLarge(f"the body exceeds {most_bytes} bytes after decompression")
    if not unzip.eof:
        raise Rejected("the body is no whole gzip: its end is missing")
    return data


def read_request(body: bytes, content_type: str) -> Received:
    """Raises: Rejected, with what is wrong."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON:
        request = _from_json(body)
    elif kind == PROTOBUF:
        try:
            request = ExportTraceServiceRequest.FromString(body)
        except DecodeError as exc:
            raise Rejected("the body is no ExportTraceServiceRequest of OTLP") from exc
    else:
        raise Rejected(f"content-type {kind!r} is not supported: send {PROTOBUF} or {JSON}")
    by_service: dict[str, list[EncodedSpan]] = defaultdict(list)
    rejected = 0
    for resource in request.resource_spans:
        service = _service(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8 and span.end_time_unix_nano:
                    by_service[service].append(_encoded(span))
                else:
                    rejected += 1
    return Received(by_service, rejected)


def _encoded(span: trace_pb2.Span) -> EncodedSpan:
    """Attributes are read only of spans that may be a request's root: most are not."""
    of_root = span.kind == trace_pb2.Span.SPAN_KIND_SERVER
    return EncodedSpan(
        span.trace_id.hex(),
        # SQLite has no larger integers
        min(span.start_time_unix_nano, (1 << 63) - 1),
        span_field(span.SerializeToString()),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes={attribute.key: plain(attribute.value) for attribute in span.attributes} if of_root else None,
    )


def _service(attributes: Iterable[KeyValue]) -> str:
    """`decode-<instance id>` for our own processes, as in their file."""
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
        raise Rejected(f"the body is no JSON of OTLP: {exc}") from exc
    return request


def _spans_of(fields: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for resource in fields.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())
