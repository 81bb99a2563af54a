"""The span of a request in a called process: what its caller records in its place if that process dies."""

from pathlib import Path

from opentelemetry import context, trace
from opentelemetry.trace import StatusCode

from components.telemetry.light_span import LightSpan
from components.telemetry.spans import Spans, called_span_id, record_lost, step, trace_context, trace_headers
from components.telemetry.trace_store import TraceStore
from tests.components.telemetry.written import writing_tracer


def called(caller: Spans, callee: Spans) -> tuple[trace.Span, trace.Span]:
    """Call instance d1; return the caller's span and the callee's."""
    with caller.start_as_current_span("frontend.dispatch") as dispatch:
        headers = trace_headers()
    token = context.attach(trace_context(headers))
    try:
        return dispatch, callee.start_called_span("decode.request", "d1")
    finally:
        context.detach(token)


def test_the_caller_records_the_span_of_a_process_that_died_under_the_same_id() -> None:
    spans: list[LightSpan] = []
    dispatch, request = called(Spans(spans.append), Spans(lambda _: None))
    record_lost("decode.request", dispatch, "d1", "silent for 2 s")
    record_lost("decode.request", dispatch, "d1", "silent for 2 s")  # once for each branch
    _, lost = spans
    assert lost.span_id == request.get_span_context().span_id
    assert lost.parent_id == dispatch.get_span_context().span_id
    assert (lost.status.status_code, lost.attributes["kvmesh.lost"]) == (StatusCode.ERROR, "silent for 2 s")


def test_spans_of_one_caller_in_two_instances_have_ids_of_their_own() -> None:
    assert called_span_id(7, "d1") != called_span_id(7, "d2") != called_span_id(8, "d2")


def test_if_the_process_lived_its_own_span_is_shown(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path)
    for comes_first in (True, False):
        dispatch, request = called(tracer, tracer)
        if comes_first:
            request.end()
        record_lost("decode.request", dispatch, "d1", "silent for 2 s")
        request.end()
        found = TraceStore(tmp_path).trace(f"{request.get_span_context().trace_id:032x}")
        assert [(span.name, span.status) for span in found] == [
            ("frontend.dispatch", "UNSET"),
            ("decode.request", "UNSET"),
        ]
    writer.close()


def test_a_measured_call_is_not_the_parent_of_what_it_calls() -> None:
    spans: list[LightSpan] = []
    tracer = Spans(spans.append)
    with tracer.start_as_current_span("decode.request") as request, step("decode.call_prefill"):
        assert trace_headers() == {"traceparent": request.traceparent()}  # type: ignore[attr-defined]
    [whole] = spans
    call, itself = whole.whole()
    assert (call.name, itself, call.parent_id) == ("decode.call_prefill", whole, whole.span_id)


def test_what_ends_after_its_request_is_recorded_by_itself() -> None:
    """Decode may get prefill's answer after the last token."""
    spans: list[LightSpan] = []
    tracer = Spans(spans.append)
    with tracer.start_as_current_span("decode.request"):
        late, child = step("decode.call_prefill"), tracer.start_span("decode.other")
    late.note({"a": 1})
    late.error = "PeerLost: gone"
    late.end()
    child.end()
    request, call, other = spans
    assert (request.steps, [span.parent_id for span in (call, other)]) == ([], [request.span_id] * 2)
    assert (call.span_id, call.attributes, call.status.description) == (late.span_id, {"a": 1}, "PeerLost: gone")
