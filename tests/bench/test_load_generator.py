"""bench.serve with a server that answers at known times: its requests, figures and errors."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from bench import serve as bench_serve
from bench.load.client import Run, body_of, closed_loop, open_loop
from bench.load.plot import save_plot
from bench.load.report import figures, more_figures, quantile_ms, table
from bench.load.workloads import random_requests
from bench.processes import free_port
from bench.serve import find_url, progress_bar
from tests.bench.served import served
from tests.waiting import PATIENCE_S, wait_until

REPO: Final = Path(__file__).resolve().parents[2]
FIRST_S: Final = 0.05
GAP_S: Final = 0.01


@dataclass
class Endpoint:
    """An OpenAI server of one thread."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    in_flight: int = 0
    most: int = 0
    refuse: bool = False

    async def tokens(self, body: dict[str, Any]) -> Any:
        try:
            await asyncio.sleep(FIRST_S)
            for _ in range(body["max_tokens"]):
                yield "data: " + json.dumps({"choices": [{"text": " w"}]}) + "\n\n"
                await asyncio.sleep(GAP_S)
            yield "data: " + json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}) + "\n\n"
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
            yield "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\ndata: [DONE]\n\n"
        finally:
            self.in_flight -= 1


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    app = FastAPI()
    port = free_port()
    state = Endpoint(f"http://127.0.0.1:{port}")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "first"}, {"id": "second"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        state.bodies.append(await request.json())
        state.times_s.append(time.perf_counter())
        if state.refuse:
            return JSONResponse({"error": {"message": "come back later"}}, 503)
        state.in_flight += 1
        state.most = max(state.most, state.in_flight)
        return StreamingResponse(state.tokens(state.bodies[-1]))

    with served(app, port):
        yield state


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.serve", *args]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize(
    ("count", "quantile", "wanted"),
    [(0, 0.5, 0), (1, 0.99, 1), (2, 0.5, 1), (6, 0.5, 3), (10, 0.9, 9), (100, 0.99, 99)],
)
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(count: int, quantile: float, wanted: int) -> None:
    """The p90 of ten was the largest, the median of six the fourth."""
    assert quantile_ms([number / 1000 for number in range(count, 0, -1)], quantile) == wanted


def test_times_are_those_that_the_server_took(endpoint: Endpoint) -> None:
    planned = random_requests(random.Random(), 4, 9, 5, 1.0)
    run = asyncio.run(closed_loop(endpoint.url, [body_of(request, "m") for request in planned], 2))
    assert (run.failed, run.prompt_tokens, run.output_tokens) == (0, 36, 20)
    assert endpoint.most == 2
    assert len({body["prompt"] for body in endpoint.bodies}) == 4, "no prompt twice"
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in endpoint.bodies)
    assert all(FIRST_S <= ttft < 30 for ttft in run.ttft_s)
    times = zip(run.ttft_s, run.tpot_s, run.e2e_s, strict=True)
    assert all(ttft + 4 * tpot == pytest.approx(e2e) for ttft, tpot, e2e in times)
    assert len(run.itl_s) == 16, "the end of a text is no token"
    assert len(run.ends_s) == 4
    assert all(e2e >= FIRST_S + 4 * GAP_S for e2e in run.e2e_s)


def test_an_open_loop_does_not_wait_for_answers(endpoint: Endpoint) -> None:
    body = {"model": "m", "prompt": "the of", "max_tokens": 40}
    run = asyncio.run(open_loop(endpoint.url, [(0.1 * i, body) for i in range(4)]))
    assert len(run.ttft_s) == 4
    assert endpoint.most >= 3
    assert endpoint.times_s[3] - endpoint.times_s[0] >= 0.15  # 0.3, less what a busy machine is late with the first
    assert run.duration_s >= 0.3 + FIRST_S + 39 * GAP_S


def test_what_a_server_refuses_is_counted_with_its_words(endpoint: Endpoint) -> None:
    endpoint.refuse = True
    run = asyncio.run(closed_loop(endpoint.url, [{"prompt": "the", "max_tokens": 2}] * 3, 1))
    assert run.failed == 3
    assert figures(run)["requests"] == 0
    assert "failed 3 times: HTTP 503" in table(run, "t")
    assert "come back later" in table(run, "t")
    result = serve("--url", endpoint.url)
    assert result.returncode == 1
    assert f"1 of 1 requests to warm up {endpoint.url} failed: HTTP 503" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_table_and_a_line_for_each_level(endpoint: Endpoint, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    args = ["--concurrency", "1", "--concurrency", "3", "--requests", "2", "--input-len", "7", "--output-len", "4"]
    result = serve("--url", endpoint.url, *args, "--json", str(lines))
    assert result.returncode == 0, result.stderr
    assert {body["model"] for body in endpoint.bodies} == {"first"}, "the first that the server names"
    assert result.stdout.count("TTFT") == 2
    assert "Total token throughput (tok/s)" in result.stdout
    one, three = (json.loads(line) for line in lines.read_text().splitlines())
    assert (one["concurrency"], one["requests"], three["concurrency"], three["requests"]) == (1, 2, 3, 6)
    assert {"label", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "output_tok_s", "req_s", "e2e_ms_p99"} <= one.keys()
    printed = serve("--url", endpoint.url, *args[2:], "--json", "-", "--model", "second", "--warmup", "0")
    assert [json.loads(line)["concurrency"] for line in printed.stdout.splitlines()] == [3]
    assert endpoint.bodies[-1]["model"] == "second"


def test_a_rate_of_requests_and_a_trace(endpoint: Endpoint, tmp_path: Path) -> None:
    rate = ["--request-rate", "50", "--num-prompts", "12", "--output-len", "3", "--input-len", "8"]
    result = serve("--url", endpoint.url, *rate, "--workload", "sharegpt-like", "--json", "-")
    line = json.loads(result.stdout)
    assert (line["requests"], line["request_rate"], line["workload"]) == (12, 50.0, "sharegpt-like")
    path = tmp_path / "trace.jsonl"
    requests = [{"timestamp": 400 * i, "input_length": 600, "output_length": 30, "hash_ids": [0, i]} for i in range(3)]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    endpoint.times_s.clear()
    endpoint.bodies.clear()
    replay = ["--workload", "trace-replay", "--trace", str(path), "--trace-scale", "0.1", "--warmup", "0"]
    result = serve("--url", endpoint.url, *replay, "--json", "-")
    assert json.loads(result.stdout)["output_tokens"] == 9, result.stderr
    assert endpoint.times_s[2] - endpoint.times_s[0] >= 0.4  # 0.8, less what a busy machine is late with the first
    prompts = [body["prompt"].split() for body in endpoint.bodies]
    assert len({tuple(prompt[:51]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_the_table_has_the_figures() -> None:
    """Two answers: of 3 tokens in the first second, and of 4, three of them in the third."""
    run = Run(ttft_s=[0.1, 0.3], tpot_s=[0.1, 0.2], itl_s=[0.1, 0.1, 0.2], e2e_s=[0.3, 0.9], prompt_tokens=40)
    run.output_tokens, run.duration_s, run.peak_in_flight, run.cut_off = 7, 4.0, 2, 1
    run.record_tokens([0.1, 0.2, 0.3], 3)
    run.record_tokens([1.9, 2.1, 2.2, 2.3], 4)
    run.fail("HTTP 503: no")
    rows = {}
    for line in table(run, "title").splitlines():
        name, _, value = line.rpartition("  ")
        rows[name.strip()] = value.strip()
    assert rows["Successful requests"] == "2"
    assert rows["Failed requests"] == "1"
    assert rows["Cut off by the end of the run"] == "1"
    assert rows["Duration (s)"] == "4.00"
    assert rows["Request throughput (req/s)"] == "0.50"
    assert rows["Output token throughput (tok/s)"] == "1.8"
    assert rows["Peak output tokens in a second"] == "3.0"
    assert rows["Total token throughput (tok/s)"] == "11.8"
    assert rows["Mean requests in flight"] == "0.30"
    assert rows["Peak requests in flight"] == "2"
    [ttft] = [line.split() for line in table(run, "title").splitlines() if line.startswith("TTFT")]
    assert ttft == ["TTFT", "200.00", "100.00", "300.00", "300.00", "300.00", "300.00"]
    assert more_figures(run)["peak_output_tok_s"] == 3.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_load_prints_its_figures(endpoint: Endpoint, number: signal.Signals) -> None:
    """An interrupted load printed nothing."""
    args = ["--concurrency", "2", "--requests", "500", "--output-len", "5", "--warmup", "0"]
    command = [sys.executable, "-m", "bench.serve", "--url", endpoint.url, *args, "--concurrency", "4"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(endpoint.bodies) >= 6 or process.poll() is not None)
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert output.count("Successful requests") == 1, "the other level was not begun"
    [successful] = [line.split()[-1] for line in output.splitlines() if line.startswith("Successful")]
    [cut] = [line.split()[-1] for line in output.splitlines() if line.startswith("Cut off")]
    assert int(successful) >= 4
    assert int(cut) == 2


def test_a_rate_may_have_a_bound_on_requests_at_once(endpoint: Endpoint) -> None:
    rate = ["--request-rate", "1000", "--num-prompts", "12", "--output-len", "3", "--input-len", "8", "--warmup", "0"]
    result = serve("--url", endpoint.url, *rate, "--max-concurrency", "3", "--json", "-")
    line = json.loads(result.stdout)
    assert (line["requests"], line["max_concurrency"], line["peak_in_flight"]) == (12, 3, 3)
    assert endpoint.most == 3


def test_progress_without_a_terminal_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_serve, "PROGRESS_S", 0.0)
    with progress_bar("8 clients", 3) as done:
        done()
        done()
    assert capsys.readouterr().err.splitlines()[1] == "8 clients: 2 of 3 requests after 0 s"


def test_the_mesh_of_this_machine_is_found_by_its_state_directory(tmp_path: Path) -> None:
    assert find_url(None, tmp_path) == "http://127.0.0.1:8000"
    (tmp_path / "local").mkdir()
    facts = {"pid": os.getpid(), "http": ["http://127.0.0.1:8147"]}
    (tmp_path / "local" / "running.json").write_text(json.dumps(facts))
    assert find_url(None, tmp_path) == "http://127.0.0.1:8147"
    assert find_url("http://given", tmp_path) == "http://given"


def test_no_server_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = serve("--url", url)
    assert result.returncode == 1
    assert result.stderr.startswith(f"no server at {url} (")
    assert result.stderr.count("\n") == 1


def test_what_cannot_work_is_said_before_the_load(endpoint: Endpoint, tmp_path: Path) -> None:
    for args, error in (
        (["--json", str(tmp_path / "none" / "x")], f"the directory {tmp_path / 'none'}"),
        (["--request-rate", "1", "--concurrency", "1"], "--concurrency and --request-rate exclude each other"),
        (["--max-concurrency", "1"], "--max-concurrency limits --request-rate or a trace"),
        (["--workload", "trace-replay"], "--workload trace-replay requires --trace FILE"),
        (["--workload", "trace-replay", "--trace", str(tmp_path / "none")], "No such file or directory"),
    ):
        result = serve("--url", endpoint.url, "--warmup", "0", *args)
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        assert error in result.stderr
    assert endpoint.bodies == []


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['matplotlib'] = None; from bench.load.plot import pyplot; pyplot()"
    result = subprocess.run([sys.executable, "-c", blocked], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install -e '.[bench]'")


def test_a_picture_of_both_distributions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Run(ttft_s=[0.1, 0.2, 0.5], itl_s=[0.01, 0.02])
    save_plot([("1 client", run), ("empty", Run())], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
