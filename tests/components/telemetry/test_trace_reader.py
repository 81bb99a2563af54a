import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from components.telemetry.spans import Spans
from components.telemetry.stored_spans import Event, Span
from components.telemetry.trace_reader import LocalTraceReader, span_from, summary_from
from components.telemetry.trace_summary import LONGEST_S, LOST_AFTER_S, summary_of
from tests.components.telemetry.written import writing_tracer

ROOT = Span(
    "a" * 32, "1" * 16, None, "frontend-f1", "chat tiny", 10**9, 3 * 10**9, "UNSET",
    {"kvmesh.request_id": "r1", "gen_ai.request.model": "tiny", "kvmesh.ttft_s": 0.5},
)  # fmt: skip
ROUTE = Span(
    "a" * 32, "2" * 16, "1" * 16, "frontend-f1", "frontend.route", 10**9, 2 * 10**9, "UNSET",
    {"kvmesh.decode.instance": "d1"}, "", (Event("moved", 10**9, {"from": "d0"}),),
)  # fmt: skip
FIRST = Span("a" * 32, "3" * 16, "1" * 16, "frontend-f1", "frontend.first_token", 10**9, 15 * 10**8, "UNSET", {})


def test_a_summary_has_the_facts_of_a_requests_spans() -> None:
    summary = summary_of([ROOT, ROUTE, FIRST])
    assert (summary.request_id, summary.model, summary.name) == ("r1", "tiny", "chat tiny")
    assert (summary.started_unix_s, summary.duration_s, summary.ttft_s) == (1.0, 2.0, 0.5)
    assert (summary.status, summary.error, summary.moved, summary.slow) == ("ok", "", True, False)
    assert (summary.decode_ids, summary.prefill_ids, summary.num_spans) == (("d1",), (), 3)


def test_summaries_and_spans_survive_json() -> None:
    for span in (ROOT, ROUTE):
        assert span_from(json.loads(json.dumps(asdict(span)))) == span
    summary = summary_of([ROOT, ROUTE, FIRST])
    assert summary_from(json.loads(json.dumps(asdict(summary)))) == summary


def test_a_refused_request_did_not_fail() -> None:
    refused = replace(ROOT, attributes={**ROOT.attributes, "kvmesh.refused": "no such model"})
    summary = summary_of([refused])
    assert (summary.status, summary.error) == ("refused", "no such model")


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/v1/responses", "responses tiny"),
        ("/v1/messages", "messages tiny"),
        ("/v1/chat/completions", "chat tiny"),
        (None, "chat tiny"),
    ],
)
def test_a_request_is_named_after_the_api(route: str | None, name: str) -> None:
    """Requests to responses and messages were listed as chat."""
    attributes = ROOT.attributes if route is None else {**ROOT.attributes, "http.route": route}
    assert summary_of([replace(ROOT, attributes=attributes)]).name == name


@pytest.mark.parametrize(
    ("names", "silent_s", "status"),
    [
        (["decode.request"], LOST_AFTER_S - 1, "running"),
        (["decode.request", "prefill.request"], LOST_AFTER_S + 1, "error"),
        (["prefill.request"], LOST_AFTER_S + 1, "running"),  # decode still generates
        (["prefill.request"], LONGEST_S + 1, "error"),
        (["a span of a client"], LONGEST_S + 1, "ok"),
    ],
)
def test_a_request_without_its_frontends_span_runs_or_has_lost_it(
    names: list[str], silent_s: float, status: str
) -> None:
    """Requests of a killed frontend stayed in progress."""
    spans = [replace(FIRST, name=name, service="decode-d1") for name in names]
    ended_s = FIRST.end_ns / 1e9
    assert summary_of(spans, ended_s + silent_s).status == status
    assert summary_of(spans).status == "ok"  # frontends keep their spans elsewhere


def test_a_stream_that_moved_runs_on() -> None:
    lost = replace(FIRST, name="decode.request", status="ERROR", error="silent for 2 s")
    assert summary_of([lost], FIRST.end_ns / 1e9 + LOST_AFTER_S + 1).status == "running"


def worker_span(tracer: Spans, name: str, ended_s: float) -> str:
    span = tracer.start_span(name, start_time=int((ended_s - 1) * 1e9))
    span.end(int(ended_s * 1e9))
    return f"{span.get_span_context().trace_id:032x}"


def test_a_request_of_a_lost_frontend_is_listed_as_failed(tmp_path: Path) -> None:
    now_s = time.time()
    tracer, writer = writing_tracer(tmp_path)
    reader = LocalTraceReader(tmp_path)
    lost = worker_span(tracer, "decode.request", now_s - 2 * LOST_AFTER_S)
    running = worker_span(tracer, "decode.request", now_s)
    assert reader.listed("failed") == []  # no frontend writes here
    assert {one.status for one in reader.listed()} == {"ok"}
    tracer.start_span("chat tiny", attributes={"kvmesh.request_id": "r1"}).end()
    writer.close()
    [failed] = reader.listed("failed")
    assert (failed.trace_id, failed.error) == (lost, "frontend lost: it left no span")
    assert reader.listed("failed", tenant="acme") == []
    assert {one.trace_id: one.status for one in reader.listed()}[running] == "running"
