import json
from dataclasses import asdict

from components.telemetry.stored_spans import Event, Span
from components.telemetry.trace_reader import span_from, summary_from
from components.telemetry.trace_summary import summary_of

ROOT = Span(
    "a" * 32, "1" * 16, None, "frontend-f1", "chat tiny", 10**9, 3 * 10**9, "UNSET",
    {"kvmesh.request_id": "r1", "gen_ai.request.model": "tiny", "kvmesh.ttft_s": 0.5},
)  # fmt: skip
ROUTE = Span(
    "a" * 32, "2" * 16, "1" * 16, "frontend-f1", "frontend.route", 10**9, 2 * 10**9, "UNSET",
    {"kvmesh.decode.instance": "d1"}, "", (Event("moved", 10**9, {"from": "d0"}),),
)  # fmt: skip
FIRST = Span("a" * 32, "3" * 16, "1" * 16, "frontend-f1", "frontend.first_token", 10**9, 15 * 10**8, "UNSET", {})


def test_a_summary_says_what_the_spans_of_a_request_say() -> None:
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
