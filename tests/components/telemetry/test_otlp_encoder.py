"""Our encoded spans, read by opentelemetry-proto and compared with the SDK's encoder."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceState

from components.telemetry import otlp_encoder
from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import encode_request, encode_resource, encode_span, span_field
from components.telemetry.stored_spans import decode_spans

VALUES: dict[str, Any] = {
    "text": "a", "long": "x" * 200, "unicode": "héé", "empty": "", "yes": True, "no": False, "zero": 0, "many": 1 << 40,
    "negative": -5, "smallest": -(1 << 63), "real": 0.25, "texts": ("a", "b"), "numbers": (1, 2), "none_of_them": (),
}  # fmt: skip
STATE = TraceState([("vendor", "a:1")])
SENT: list[LightSpan] = []


def span(**options: Any) -> LightSpan:
    fields: dict[str, Any] = {"name": "n", "trace_id": 1 << 127, "parent_id": 0, "flags": 1, "sink": SENT.append}
    return LightSpan(**{**fields, "start_time": 5, **options})


def decoded(of: LightSpan) -> trace_pb2.Span:
    return trace_pb2.Span.FromString(encode_span(of))


def test_every_kind_of_value_arrives() -> None:
    one = span(attributes=VALUES)
    one.end(9)
    [read] = decode_spans("s", span_field(encode_span(one)))
    assert read.attributes == {name: list(v) if isinstance(v, tuple) else v for name, v in VALUES.items()}
    assert (read.trace_id, read.parent_id, read.start_ns, read.end_ns) == (f"{1 << 127:032x}", None, 5, 9)


@pytest.mark.parametrize("value", [{"a": 1}, b"bytes", 1 << 64, None, object])
def test_a_value_that_otlp_has_not_becomes_text(value: Any) -> None:
    one = span(attributes={"odd": value})
    one.end()
    assert decoded(one).attributes[0].value.string_value == str(value)


def test_text_that_is_no_unicode_and_text_without_end_arrive_in_part() -> None:
    one = span(name="\ud800" + "n" * 9000, attributes={"a": "\ud800b", "b": "x" * 9000, "c": ["y" * 3000] * 5})
    one.set_status(StatusCode.ERROR, "z" * 9000)
    one.end()
    read = decoded(one)
    most = otlp_encoder.ATTRIBUTE_CHARS
    assert [len(a.value.string_value) for a in read.attributes] == [2, most, most]
    assert len(read.name) == len(read.status.message) == most


@pytest.mark.parametrize("kind", list(SpanKind))
@pytest.mark.parametrize("remote", [True, False])
def test_the_message_is_the_one_that_the_sdk_makes(kind: SpanKind, remote: bool) -> None:
    parent = trace.SpanContext(77, 88, remote, trace.TraceFlags(1), STATE)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "kvmesh-x", "n": 3}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    theirs = provider.get_tracer("kvmesh").start_span("step", context, kind, VALUES, start_time=11)
    ours = span(
        name="step", trace_id=77, parent_id=88, kind=kind, attributes=VALUES, start_time=11, remote=remote, state=STATE
    )
    for one in (theirs, ours):
        one.add_event("moved", {"from": "d1"}, 12)
        one.set_status(Status(StatusCode.ERROR, "why"))
        one.end(20)
    ours.span_id = theirs.get_span_context().span_id
    wanted = encode_spans(exporter.get_finished_spans())
    resource = encode_resource({"service.name": "kvmesh-x", "n": 3})
    made = ExportTraceServiceRequest.FromString(encode_request(resource, [span_field(encode_span(ours))]))
    assert made == wanted


def test_the_sdks_exporters_take_our_spans() -> None:
    one = span(parent_id=5, attributes={"a": 1})
    one.add_event("moved")
    one.end(9)
    exporter = InMemorySpanExporter()
    exporter.export([one])
    [kept] = exporter.get_finished_spans()
    assert kept.parent is not None
    assert (kept.name, kept.context.span_id, kept.parent.span_id, kept.attributes) == ("n", one.span_id, 5, {"a": 1})
