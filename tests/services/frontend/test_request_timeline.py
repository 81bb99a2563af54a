"""One line for each request, at its end."""

import logging
from typing import Any

import httpx
import pytest
from opentelemetry.trace import StatusCode
from prometheus_client import Counter

from components import token_bucket
from components.api_keys import parse_file
from components.errors import PeerLost, QueueFull
from components.http.server import serve_http
from components.openai.errors import from_status
from components.telemetry import light_span
from components.telemetry.logs import RequestIds
from components.telemetry.spans import NOT_KEPT
from components.telemetry.trace_pieces import TENANT
from components.wire.generate import PromptOrigin
from services.frontend import request_timeline
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings, SlowLimits
from services.frontend.keys import KeyRing
from services.frontend.request_lines import RequestLines
from services.frontend.request_timeline import RequestTimeline, decode_of, unkept_timeline
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import PATIENCE_S, until

SECRET = "my-secret-prompt"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (light_span, request_timeline):
        monkeypatch.setattr(module, "time_ns", made)
    return made


def timeline_of() -> RequestTimeline:
    return unkept_timeline(NOT_KEPT, "chat", phase="frontend.validate")


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(RequestIds())  # as `configure_logs` does
    caplog.set_level(logging.INFO)


def written(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == "kvmesh.requests"]


def run(timeline: RequestTimeline, clock: Clock, **seconds: float) -> None:
    """Let the phases last so long."""
    for name, lasts_s in seconds.items():
        if name in {"route", "dispatch"}:
            timeline.pause()
            with timeline.step("frontend.route") if name == "route" else timeline.dispatching():
                clock.wait(lasts_s)
        elif name == "prefill":
            clock.wait(lasts_s)
            timeline.first_ns = clock.now_ns
            timeline.begin("frontend.first_token", clock.now_ns)
            timeline.first_token_sent()
        else:
            if name not in {"validate", "stream"}:
                timeline.begin(f"frontend.{name}")
            clock.wait(lasts_s)


def test_the_phases_of_a_request_add_up_to_its_time(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    timeline = timeline_of()
    wanted = {
        "validate": 0.01, "tokenize": 0.02, "admit": 0.3, "route": 0.04, "dispatch": 0.01, "prefill": 0.5, "stream": 1.0,
    }  # fmt: skip
    run(timeline, clock, **wanted)
    timeline.sent_to("d1")
    timeline.prompt_computed(PromptOrigin(prefill="p1"))
    RequestLines().end(timeline, "/v1/completions", "m", 200, prompt_tokens=7, cached_tokens=2, output_tokens=11)
    [line] = written(caplog)
    assert {name: line[f"{name}_s"] for name in wanted} == wanted
    assert line["total_s"] == pytest.approx(sum(wanted.values()))
    assert line["ttft_s"] == 0.88
    assert (line["decode"], line["prefill"], line["status"]) == ("d1", "p1", 200)
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (7, 2, 11)
    assert not {"slow", "error", "moves", "local_prefill"} & line.keys()
    assert line["levelno"] == logging.INFO


def test_a_slow_request_tells_its_longest_phase_its_moves_and_where_its_prompt_was_computed(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = timeline_of()
    run(timeline, clock, tokenize=0.1, admit=4.0, route=0.1, dispatch=0.0, prefill=1.0, stream=5.0)
    for decode in ("d1", "d2"):
        timeline.sent_to(decode)
    timeline.moved("decode d1: silent for 2 s")
    timeline.prompt_computed(PromptOrigin(prefill="p1", why_local="no answer in 6 s"))
    timeline.prompt_computed(PromptOrigin(why_local="no prefill instance is alive"))
    slow = Counter("slow", "by reason", ["reason"], registry=None)
    RequestLines(slow=slow).end(timeline, "/v1/completions", "m", 200, output_tokens=11)
    [line] = written(caplog)
    assert line["slow"] == (
        "admit took 4.0 s of the 5.2 s to the first token; 0.50 s per output token; moved once; "
        "its prompt was computed on decode"
    )
    counted = {s.labels["reason"]: s.value for metric in slow.collect() for s in metric.samples if s.value == 1}
    assert counted == {"ttft": 1, "tpot": 1}
    assert (timeline.root.attributes["kvmesh.slow"], timeline.root.attributes["kvmesh.moved"]) == (True, True)
    assert (line["decode"], line["prefill"]) == ("d1,d2", "p1")
    assert line["local_prefill"] == "no answer in 6 s; no prefill instance is alive"
    assert (line["moves"], line["moved_because"]) == (1, "decode d1: silent for 2 s")
    assert line["levelno"] == logging.WARNING


def test_a_request_that_fails_before_its_first_token_is_slow_where_it_waited(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = timeline_of()
    run(timeline, clock, tokenize=0.0, admit=30.0)
    timeline.failed(QueueFull("the queue is full"), from_status(503))
    RequestLines().end(timeline, "/v1/completions", "m", 503)
    [line] = written(caplog)
    assert line["slow"] == "admit took 30.0 s of the 30.0 s to the first token"
    failed = [step.name for step in timeline.root.steps if step.status.status_code is StatusCode.ERROR]
    assert failed == ["frontend.admit"]
    assert (line["error"], line["reason"]) == ("QueueFull", "the queue is full")
    assert "ttft_s" not in line


@pytest.mark.parametrize(("searched_s", "slow"), [(0, "prefill took 4.0 s"), (30, "route took 36.0 s")])
def test_the_phases_of_a_request_that_fails_before_its_first_token_add_up(
    clock: Clock, searched_s: int, slow: str
) -> None:
    """The wait for the first token also counted as `fail`, and the search for another decode also as `prefill`."""
    timeline = timeline_of()
    run(timeline, clock, validate=1, route=2, dispatch=1)
    clock.wait(4)
    if searched_s:
        run(timeline, clock, route=searched_s)
    timeline.failed(PeerLost("decode d1: silent for 2 s"), from_status(503))
    clock.wait(0.25)
    late = timeline.close(SlowLimits(), 0)
    total_s = 8.25 + searched_s
    assert sum(timeline.spent_s(timeline.end_ns).values()) == total_s
    assert late == {"ttft": f"{slow} of the {total_s:.1f} s to the first token"}


def test_a_stream_that_stalls_after_its_first_token_is_slow(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for gap_s in (4.9, 5.0):
        timeline = timeline_of()
        run(timeline, clock, route=0.1, dispatch=0.0, prefill=0.1, stream=20.0)
        timeline.longest_gap_s = gap_s
        RequestLines(limits=SlowLimits(stall_s=5.0)).end(timeline, "/v1/completions", "m", 200, output_tokens=1000)
    assert [line.get("slow") for line in written(caplog)] == [None, "no token for 5.0 s"]


def test_steps_of_several_prompts_at_once_count_once(clock: Clock) -> None:
    timeline = timeline_of()
    timeline.pause()
    with timeline.step("frontend.route"):
        clock.wait(1)
        with timeline.step("frontend.route"):
            clock.wait(2)
    assert timeline.spent_s(clock.now_ns)["route"] == 3


def test_the_time_between_two_steps_counts_as_the_later_one_so_that_all_phases_make_the_total(clock: Clock) -> None:
    """On a busy machine the frontend waits for a core there, also before it tries another decode."""
    timeline = timeline_of()
    began_ns = clock.now_ns
    clock.wait(1)
    timeline.pause()
    clock.wait(0.5)
    for seconds in (2, 3):
        with timeline.step("frontend.route"):
            clock.wait(seconds)
        clock.wait(0.25)
        with timeline.dispatching():
            clock.wait(4)
        clock.wait(0.125)
    timeline.first_ns = clock.now_ns
    clock.wait(5)
    timeline.begin("frontend.first_token", timeline.first_ns)
    clock.wait(1)
    timeline.first_token_sent()
    clock.wait(7)
    timeline.close(SlowLimits(), 2)
    spent = timeline.spent_s(timeline.end_ns)
    assert spent.pop("validate") == 1
    assert spent == {
        "route": 0.5 + 2 + 0.125 + 3, "dispatch": 2 * 4.25, "prefill": 0.125, "first_token": 6, "stream": 7,
    }  # fmt: skip
    assert sum(spent.values()) + 1 == (timeline.end_ns - began_ns) / 1e9


def test_the_phases_of_a_stream_that_moved_add_up_too(clock: Clock) -> None:
    """Those of the move counted beside the stream, and the span of the lost decode as a phase."""
    timeline = timeline_of()
    began_ns = clock.now_ns
    run(timeline, clock, validate=1, route=2, dispatch=1, prefill=3, stream=4)
    with timeline.step("frontend.route"):
        clock.wait(0.5)
    with timeline.step("frontend.dispatch"), timeline.step("decode.request"):
        clock.wait(0.25)
    clock.wait(6)
    timeline.close(SlowLimits(), 9)
    spent = timeline.spent_s(timeline.end_ns)
    assert spent == {
        "validate": 1, "route": 2, "dispatch": 1, "prefill": 3, "first_token": 0, "stream": 4 + 0.5 + 0.25 + 6,
    }  # fmt: skip
    assert sum(spent.values()) == (timeline.end_ns - began_ns) / 1e9


def test_outside_a_request_facts_go_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    request_timeline.request_timeline().moved("nobody's")
    assert request_timeline.request_timeline() is not request_timeline.request_timeline()
    assert not written(caplog)


def test_the_decode_instance_of_a_running_request_is_known_to_its_own_tenant() -> None:
    root = light_span.LightSpan("chat", 0xAB, 0, 0, lambda _: None, attributes={TENANT: "acme"})
    trace_id = f"{0xAB:032x}"
    with RequestTimeline(root, root) as timeline:
        assert decode_of(trace_id, None) == ""
        timeline.sent_to("d1")
        timeline.sent_to("d2")
        assert [decode_of(trace_id, tenant) for tenant in (None, "acme", "bob")] == ["d2", "d2", ""]
        assert decode_of("no number", None) == ""
    assert decode_of(trace_id, None) == ""


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_writes_one_line_without_its_content(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    headers = {"X-Request-Id": "mine"}
    assert (
        await http.post("/v1/chat/completions", json={**BODY, "stream": stream}, headers=headers)
    ).status_code == 200
    await until(lambda: written(caplog))  # a stream's client may be done before the line is written
    [line] = written(caplog)
    assert (line["route"], line["model"], line["status"]) == ("/v1/chat/completions", MODEL, 200)
    [prompt] = mesh.prompts
    assert line["request_id"] == prompt.request_id
    assert line["client_request_id"] == "mine"
    assert line["prompt_tokens"] == len(prompt.token_ids)
    assert line["cached_tokens"] == 2
    assert line["output_tokens"] > 3
    assert line["total_s"] >= line["ttft_s"] > 0
    assert not any(SECRET in str(record) or "Paris" in str(record) for record in map(vars, caplog.records))


@pytest.mark.anyio
async def test_lines_of_a_library_inside_a_request_have_the_id_of_its_line(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = FakeMesh.generate

    async def chatty(self: FakeMesh, *args: Any) -> Any:
        logging.getLogger("a_library").warning("inside")
        return await generate(self, *args)

    monkeypatch.setattr(FakeMesh, "generate", chatty)
    await http.post("/v1/chat/completions", json=BODY)
    await http.post("/v1/chat/completions", json=BODY)
    inside = [vars(record)["request_id"] for record in caplog.records if record.name == "a_library"]
    assert inside == [line["request_id"] for line in written(caplog)] == [p.request_id for p in mesh.prompts]


@pytest.mark.anyio
async def test_failed_and_refused_requests_have_a_line_each_and_a_client_error_quotes_nothing(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.fail_at, mesh.failure = 0, PeerLost("decode d1: gone")
    assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 502
    assert (await http.post("/v1/chat/completions", json={**BODY, "tool_choice": SECRET})).status_code == 400
    assert (await http.post("/tokenize", json={"model": MODEL, "prompt": SECRET})).status_code == 200
    lost, refused, tokenized = written(caplog)
    assert (lost["status"], lost["error"], lost["reason"]) == (502, "PeerLost", "decode d1: gone")
    assert lost["levelno"] == logging.WARNING
    assert (refused["status"], refused["levelno"]) == (400, logging.INFO)
    assert (refused["error"], refused["param"]) == ("Rejected", "tool_choice")
    assert "reason" not in refused
    assert (tokenized["route"], tokenized["status"]) == ("/tokenize", 200)
    assert not any(SECRET in str(vars(record)) for record in caplog.records)


@pytest.mark.anyio
async def test_the_line_of_a_refused_request_names_the_parameter_and_holds_no_zeros(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It had an empty model, zeros and no reason."""
    assert (await http.post("/v1/chat/completions", json={**BODY, "foo": 1})).status_code == 400
    assert (await http.post("/v1/chat/completions", json={**BODY, f"{SECRET} ": 1})).status_code == 400
    named, odd = written(caplog)
    assert (named["code"], named["param"]) == ("unknown_parameter", "foo")
    assert odd["code"] == "unknown_parameter"
    assert not {"model", "prompt_tokens", "cached_tokens", "output_tokens"} & named.keys()
    assert not any(SECRET in str(vars(record)) for record in caplog.records)


def test_ordinary_lines_beyond_the_limit_are_counted_and_others_are_always_written(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lines = RequestLines(0.1)  # and one at once
    for _ in range(3):
        lines.end(timeline_of(), "/v1/completions", "m", 200)
    moved = timeline_of()
    moved.moved("decode d1: silent for 2 s")
    lines.end(moved, "/v1/completions", "m", 200)
    lines.end(timeline_of(), "/v1/completions", "m", 503)
    assert [(line["status"], line.get("left_out")) for line in written(caplog)] == [(200, None), (200, 2), (503, None)]


@pytest.mark.anyio
async def test_requests_that_the_gate_refuses_have_a_line_within_the_limit(
    mesh: FakeMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_bucket, "BURST_S", 10_000.0)
    keys = KeyRing(parse_file('[alice]\nkey = "sk-alice-0123456789"\nrequests_per_minute = 1\n'))
    settings = FrontendSettings(port=0, drain_timeout_s=2, request_lines_per_s=0.0004)  # four at once
    alice = {"authorization": "Bearer sk-alice-0123456789", "x-request-id": "mine"}
    async with (
        serve_http(create_app(mesh, mesh.text, settings, keys=keys), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 401
        assert (await http.post("/v1/chat/completions", json=BODY, headers=alice)).status_code == 200
        limited = await http.post("/v1/chat/completions", json=BODY, headers=alice)
        assert limited.status_code == 429
        for _ in range(3):
            await http.get("/x" * 500, headers={"authorization": f"Bearer {SECRET}"})
    missing, _, over, wrong = written(caplog)
    assert (missing["route"], missing["status"]) == ("/v1/chat/completions", 401)
    assert (over["status"], over["api_key"], over["client_request_id"]) == (429, "alice", "mine")
    assert (wrong["status"], len(wrong["route"])) == (401, 128)
    assert all(line["request_id"] and line["error"] for line in (missing, over, wrong))
    assert len({line["request_id"] for line in (missing, over, wrong)}) == 3
    assert not any(SECRET in str(vars(record)) for record in caplog.records)


@pytest.mark.anyio
async def test_a_page_of_another_site_is_refused_with_a_line(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await http.post("/v1/chat/completions", json=BODY, headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    [line] = written(caplog)
    assert (line["status"], line["request_id"]) == (403, answer.headers["x-request-id"])
