"""`services.inspect` on a real mesh of mock workers; and all log lines of a request have one id."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.inspect import __main__ as inspect
from tests.mesh.harness import REPO, MeshProcesses, Worker
from tests.mesh.mocks import MOCK_ENV, MODEL
from tests.mesh.preloaded import Preloaded
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

SLOW: Final = {"SPEEDUP": "1", "PROMPT_TOKEN_S": "0.002", "STEP_S": "0"}  # a prompt of 400 tokens takes 0.8 s
SECRET: Final = "the-content-of-a-request"


@pytest.fixture(scope="module")
def mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshProcesses]:
    """One mesh for the file: the tests run in order, and the last ones end workers."""
    home = tmp_path_factory.mktemp("inspect")
    namespace = f"test-inspect-{uuid4().hex[:6]}"
    env = MOCK_ENV | {"MESH_TRANSFER_TIMEOUT_S": "60"}  # so that prefill computes also slow prompts
    with MeshProcesses(etcd_url, nats_url, namespace, home, MODEL, env, preloaded) as made:
        made.start("bootstrap", "decode", "decode", "frontend")
        made.start_one("prefill", **{f"MESH_ENGINE__MOCK__{name}": value for name, value in SLOW.items()})
        wait_until(made.one("frontend").models, "the frontend lists the model")
        yield made


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "console", Console(width=250, color_system=None))


def _options(mesh: MeshProcesses) -> list[str]:
    user = mesh.as_user("inspect")
    urls = ["--etcd-url", user.etcd_url, "--nats-url", user.nats_url]
    return [*urls, "--namespace", mesh.namespace, "--state-dir", str(mesh.home)]


def inspected(mesh: MeshProcesses, *command: str) -> tuple[int, str]:
    result = CliRunner().invoke(inspect.app, [*command, *_options(mesh)])
    error = result.exception.code if isinstance(result.exception, SystemExit) else None
    return result.exit_code, result.output + (error if isinstance(error, str) else "")


def shown(mesh: MeshProcesses, *command: str) -> Any:
    """Return the JSON of a command, which must succeed."""
    code, text = inspected(mesh, *command, "--json")
    assert code == 0, text
    return json.loads(text)


def ask(mesh: MeshProcesses, number: int = 0) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": f"{number} {SECRET} " + "word " * 60,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{mesh.one('frontend').url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logged(worker: Worker, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in worker.logged().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def ids(mesh: MeshProcesses, role: str) -> list[str]:
    return [row["instance"] for row in shown(mesh, "top", "--once")["rows"] if row["role"] == role]


def process_of(mesh: MeshProcesses, instance: str) -> Worker:
    return next(w for w in mesh.workers if logged(w, "ready") and logged(w, "ready")[0]["instance"] == instance)


def test_top_rooms_and_kv_show_transfers_while_they_run_and_afterwards(mesh: MeshProcesses) -> None:
    with ThreadPoolExecutor() as asking:
        requests = [asking.submit(ask, mesh, number) for number in range(4)]
        full: list[Any] = []

        def has_a_room_with_three_sides() -> bool:
            full[:] = [r for r in shown(mesh, "rooms") if r["decode"] and r["bootstrap"] and r["prefill"]]
            return bool(full)

        wait_until(has_a_room_with_three_sides, "a room that all sides report")
        for one in requests:
            one.result()
    [prefill] = ids(mesh, "prefill")
    assert full[0]["prefill"]["instance"] == prefill
    assert full[0]["decode"]["instance"] in ids(mesh, "decode")
    frame = shown(mesh, "top", "--once")
    assert {row["role"] for row in frame["rows"]} == {"frontend", "bootstrap", "decode", "prefill"}
    wait_until(lambda: all(row["state"] == "ok" for row in shown(mesh, "top", "--once")["rows"]), "all states are ok")
    assert all(row["heartbeat_age_s"] is not None for row in frame["rows"] if row["role"] in ("decode", "prefill"))
    wait_until(lambda: len(logged(mesh.one("frontend"), "request")) == 4, "a line per request")
    at_prefill = sum("local_prefill" not in line for line in logged(mesh.one("frontend"), "request"))
    assert sum(link["transfers"] for link in frame["links"]) == at_prefill > 0
    assert all(link["prefill"] == prefill and link["bytes"] > 0 for link in frame["links"])
    assert prefill in inspected(mesh, "top", "--once")[1]
    assert "no room is open" in inspected(mesh, "rooms")[1]

    number = _through_prefill(mesh, 10)[0]
    overview = shown(mesh, "kv")
    assert {one["role"] for one in overview["caches"]} == {"decode", "prefill"}
    assert any(prefill in group["instances"] for group in overview["shared"])
    text = f"{number} {SECRET} " + "word " * 60
    by_instance = {hit["instance"]: hit for hit in shown(mesh, "kv", "--no-chat", "--prompt", text)["instances"]}
    whole = len(text) // 16 * 16
    assert by_instance[prefill]["cached_tokens"] == whole
    assert sorted(by_instance[name]["cached_tokens"] == whole for name in ids(mesh, "decode")) == [False, True]
    block = overview["shared"][0]["last_block"]
    assert sorted(shown(mesh, "kv", "--block", block[:10])[block]) == sorted(overview["shared"][0]["instances"])
    few = [*map(str, text.encode()[:40])]
    hits = shown(mesh, "kv", "--token-ids", ",".join(few), "--first", "32")
    assert (hits["tokens"], hits["instances"][0]["cached_tokens"]) == (32, 32)


def test_doctor_finds_nothing_wrong_in_a_mesh_that_works_and_names_its_transport(mesh: MeshProcesses) -> None:
    for _ in range(3):  # a process that is stalled for a moment does not answer
        code, text = inspected(mesh, "doctor")
        if code == 0:
            break
    assert code == 0, text
    assert "\n0 wrong" in text
    found = shown(mesh, "doctor")
    transfers = [one["what"] for one in found if one["check"] == "KV transfer"]
    assert len(transfers) == 3
    assert all("nixl/UCX; in use:" in what for what in transfers), transfers
    assert any("plugins on this host" in one["what"] and "UCX" in one["what"] for one in found)


def test_workers_routes_planners_and_addresses_are_json_too(mesh: MeshProcesses) -> None:
    for number in range(300, 304):
        _asked(mesh, number)
    found = shown(mesh, "workers")
    assert found["not_in_etcd"] == []
    assert sorted(one["role"] for one in found["instances"]) == [
        "bootstrap", "decode", "decode", "frontend", "prefill",
    ]  # fmt: skip
    assert {one["state"] for one in found["instances"]} == {"ok"}
    assert all(one["load"]["total_pages"] > 0 for one in found["instances"] if one["kv"] is not None)
    assert sum((one["calls"] or {}).get("generate", 0) for one in found["instances"]) >= 4
    route = shown(mesh, "route", "--prompt", "word " * 60, "--no-chat")
    assert (route["tokens"], [one["role"] for one in route["choices"]]) == (300, ["frontend", "decode"])
    assert route["choices"][0]["chosen"] in ids(mesh, "decode")
    assert [one["instance_id"] for one in route["choices"][1]["candidates"]] == ids(mesh, "prefill")
    assert shown(mesh, "env")["MESH_NAMESPACE"] == mesh.namespace
    code, text = inspected(mesh, "planner", "--json")
    assert (code, "no planner answers" in text) == (1, True)


def test_lines_of_one_request_have_one_id_in_all_processes_and_none_of_its_content(mesh: MeshProcesses) -> None:
    code, text = inspected(mesh, "set", "all", "--log-level", "debug", "--traces-per-s", "inf")
    assert code == 0, text
    assert text.count("log level debug, inf traces/s") == 5
    _, line = _through_prefill(mesh, 20)
    assert (line["status"], line["output_tokens"]) == (200, 8)
    phases = {name: line[name] for name in line if name.endswith("_s") and name not in {"total_s", "ttft_s"}}
    assert {"validate_s", "tokenize_s", "route_s", "dispatch_s", "prefill_s", "stream_s"} <= phases.keys()
    assert sum(phases.values()) == pytest.approx(line["total_s"], abs=0.001)
    assert line["prefill"] in ids(mesh, "prefill")
    prefill, decode = _ended(mesh, line["prefill"], line), _ended(mesh, line["decode"], line)
    assert decode["prefill"] == line["prefill"]
    for other in (prefill, decode):
        assert other["trace_id"] == line["trace_id"]
    states = [one for one in logged(process_of(mesh, line["prefill"]), "state") if "request_id" in one]
    assert any(one["request_id"] == prefill["request_id"] for one in states)
    assert not any(SECRET in worker.logged() for worker in mesh.workers)

    inspected(mesh, "set", "all", "--log-level", "info")
    code, text = inspected(mesh, "set", "decode", "--log-level", "debug", "--logger", "services.decode.servce")
    assert code == 1
    assert "did you mean services.decode.service" in text


def test_a_drained_worker_gets_nothing_until_it_is_undone_and_unknown_ids_are_refused(mesh: MeshProcesses) -> None:
    one, other = ids(mesh, "decode")
    code, text = inspected(mesh, "drain", one, "--wait")
    assert code == 0, text
    assert f"decode {one} has no work left" in text
    wait_until(lambda: _state(mesh, one) == "drained", "top shows it")
    assert {_asked(mesh, number)["decode"] for number in range(200, 204)} == {other}
    drains = '"level": "note", "what": "decode ' + one + " drains"
    wait_until(lambda: drains in inspected(mesh, "doctor", "--json")[1], "doctor notes it")
    assert inspected(mesh, "drain", one, "--undo")[0] == 0
    wait_until(lambda: _state(mesh, one) == "ok", "it accepts work again")
    code, text = inspected(mesh, "drain", "zzzz")
    assert (code, text.startswith("no instance id begins with 'zzzz'; there are")) == (1, True)
    code, text = inspected(mesh, "set", "zzzz", "--log-level", "info")
    assert (
        code,
        text.startswith("no instance id begins with 'zzzz', and it is neither all nor a role (frontend, "),
    ) == (1, True)


def test_a_drained_frontend_refuses_requests_and_finishes_those_it_has_until_it_is_undone(mesh: MeshProcesses) -> None:
    frontend = mesh.one("frontend")
    [instance] = ids(mesh, "frontend")
    long = {"model": MODEL, "prompt": "word " * 1000, "max_tokens": 8, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor() as asking:  # prefill takes 10 s
        begun = asking.submit(httpx.post, f"{frontend.url}/v1/completions", json=long, timeout=PATIENCE_S)
        wait_until(lambda: shown(mesh, "rooms"), "it is underway")
        code, text = inspected(mesh, "drain", instance)
        assert (code, f"frontend {instance} drains" in text) == (0, True)
        refused = httpx.post(f"{frontend.url}/v1/completions", json=long, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        for url in (frontend.url, _metrics_of(frontend)):
            ready = httpx.get(f"{url}/ready", timeout=PATIENCE_S)
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["this frontend is draining"])
        assert httpx.get(f"{frontend.url}/live", timeout=PATIENCE_S).status_code == 200
        assert _state(mesh, instance) == "draining"
        assert not begun.done()
        assert begun.result().text.endswith("data: [DONE]\n\n"), "its stream finishes"
    wait_until(lambda: _state(mesh, instance) == "drained", "it has finished its stream")
    assert inspected(mesh, "drain", instance, "--wait")[0] == 0
    assert inspected(mesh, "drain", instance, "--undo")[0] == 0
    assert httpx.get(f"{frontend.url}/ready", timeout=PATIENCE_S).status_code == 200
    ask(mesh, 300)


def test_prompts_are_computed_on_decode_while_the_only_bootstrap_replica_drains(mesh: MeshProcesses) -> None:
    [bootstrap] = ids(mesh, "bootstrap")
    assert inspected(mesh, "drain", bootstrap, "--wait")[0] == 0
    line = _asked(mesh, 400)
    assert line["local_prefill"].endswith("this bootstrap replica is draining"), line
    assert inspected(mesh, "drain", bootstrap, "--undo")[0] == 0
    _through_prefill(mesh, 401)


def test_events_show_a_stop_and_a_kill_as_they_happen_and_doctor_fails_meanwhile(mesh: MeshProcesses) -> None:
    stopped, killed = ids(mesh, "decode")
    command = [sys.executable, "-X", "faulthandler", "-m", "services.inspect", "events", "--json", *_options(mesh)]
    out = mesh.home / "events.jsonl"
    with out.open("wb") as stream:
        events = subprocess.Popen(command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    try:
        wait_until(lambda: len({*_events(out, "first heartbeat")}) == 3, "it follows all workers")
        code, text = inspected(mesh, "drain", stopped, "--stop", "--wait")
        assert code == 0, text
        worker = process_of(mesh, stopped)
        wait_until(lambda: worker.popen.poll() is not None, "it ends")
        assert worker.popen.poll() == 0
        process_of(mesh, killed).kill()
        wait_until(lambda: killed in _events(out, "lost"), "its heartbeats are missed")
        code, text = inspected(mesh, "doctor")
        assert code == 1
        assert "no decode instance answers" in text
        wait_until(lambda: killed in _events(out, "left etcd"), "its lease expires")
        events.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            events.wait(PATIENCE_S / 2)  # the test's own limit must not come before the signal
    finally:
        events.send_signal(signal.SIGABRT)  # if it still runs: faulthandler writes its stacks
        ended = events.wait(PATIENCE_S)
    assert ended == 130, out.read_text()
    assert stopped in _events(out, "left etcd")
    assert all(line.startswith("{") for line in out.read_text().splitlines()), "nothing but objects"


def _metrics_of(worker: Worker) -> str:
    return str(logged(worker, "ready")[0]["metrics"])


def _asked(mesh: MeshProcesses, number: int) -> dict[str, Any]:
    """Send a request; return the frontend's log line of it."""
    frontend = mesh.one("frontend")
    before = len(logged(frontend, "request"))
    ask(mesh, number)
    wait_until(lambda: len(logged(frontend, "request")) > before, "a line per request")
    return logged(frontend, "request")[-1]


def _through_prefill(mesh: MeshProcesses, number: int) -> tuple[int, dict[str, Any]]:
    """Try until prefill computes a prompt: decode does while prefill is stalled. Return its number and log line."""
    for turn in range(number, number + 3):
        line = _asked(mesh, turn)
        if "local_prefill" not in line:
            return turn, line
    raise AssertionError(line)


def _ended(mesh: MeshProcesses, instance: str, request: dict[str, Any]) -> dict[str, Any]:
    """Wait for a worker's log line of a request."""

    def found() -> list[dict[str, Any]]:
        lines = logged(process_of(mesh, instance), "request ended")
        return [line for line in lines if line["request_id"].startswith(request["request_id"])]

    wait_until(found, f"{instance} reports the request's end")
    [line] = found()
    return line


def _state(mesh: MeshProcesses, instance: str) -> str:
    rows = shown(mesh, "top", "--once")["rows"]
    return str(next(row["state"] for row in rows if row["instance"] == instance))


def _events(out: Path, what: str) -> list[str]:
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    return [line["instance"] for line in lines if line["what"] == what]
