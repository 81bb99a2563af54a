"""Every path of a request through one mesh: its trace is a tree, and its phases cover the time.

Embeddings are in test_embeddings_mesh.py: the mock engine makes none. Tests run in order: later ones start prefill and
bootstrap, the last ones kill workers.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from components.telemetry.stored_spans import Span
from components.telemetry.trace_summary import summary_of
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.preloaded import Preloaded
from tests.mesh.trace_checks import covered_trace, names_of, whole_trace
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

ENV: Final = {
    **MOCK_ENV,
    "MESH_ENGINE__MOCK__SPEEDUP": "1",  # steps of 10 ms, as a real model's: a phase is longer than a gap
    "MESH_PREFILL_ENGINE__MOCK__PROMPT_TOKEN_S": "0.002",  # so that a long prompt is there until prefill is killed
}
FRONTEND: Final = {"frontend.validate", "frontend.tokenize", "frontend.route", "frontend.dispatch"}
TOKENS: Final = {"decode.request", "decode.lookup", "decode.choose_prefill", "decode.generate"}
ANSWER: Final = {"frontend.receive", "frontend.first_token", "frontend.stream"}
EVERY: Final = FRONTEND | TOKENS | ANSWER
LOCAL: Final = EVERY | {"decode.prefill"}
TRANSFER: Final = {
    "decode.call_prefill", "decode.reserve", "decode.open_room", "decode.receive", "decode.first_token", "bootstrap.open",
    "prefill.request", "prefill.queue", "prefill.compute", "prefill.bootstrap", "prefill.transfer", "prefill.inflight",
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshProcesses]:
    home = tmp_path_factory.mktemp("traces")
    namespace = f"traces-{secrets.token_hex(3)}"
    with MeshProcesses(etcd_url, nats_url, namespace, home, "mock", ENV, preloaded) as processes:
        processes.start("decode", "decode")
        yield processes


@pytest.fixture(scope="module")
def http(mesh: MeshProcesses) -> Iterator[httpx.Client]:
    """A frontend that samples no request but keeps each as slow, so that other processes export the spans they hold."""
    yield from _frontend(mesh, MESH_TRACES_PER_S="0", MESH_FRONTEND_SLOW_TTFT_S="0.000001")


@pytest.fixture(scope="module")
def sampling(mesh: MeshProcesses) -> Iterator[httpx.Client]:
    """A frontend that samples every request, so that a killed process has exported some of its spans."""
    yield from _frontend(mesh, MESH_TRACES_PER_S="inf")


def _frontend(mesh: MeshProcesses, **env: str) -> Iterator[httpx.Client]:
    frontend = mesh.start_one("frontend", **env)
    wait_until(frontend.models)
    with httpx.Client(base_url=frontend.url, timeout=PATIENCE_S) as client:
        yield client


def _body(words: int = 40, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    prompt = f"{secrets.token_hex(8)} {'word ' * words}"  # in no prefix cache
    return {"model": "mock", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}


def _ask(http: httpx.Client, **fields: Any) -> str:
    answer = http.post("/v1/completions", json=_body(**fields))
    assert answer.is_success, answer.text
    return str(answer.headers["x-request-id"])


def _covered(ask: Callable[[], str], mesh: MeshProcesses, names: set[str]) -> list[Span]:
    return covered_trace(ask, mesh.home, names)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_without_prefill_is_covered(http: httpx.Client, mesh: MeshProcesses, stream: bool) -> None:
    spans = _covered(lambda: _ask(http, stream=stream), mesh, LOCAL)
    summary = summary_of(spans)
    assert (summary.status, summary.moved, summary.slow, summary.model) == ("ok", False, True, "mock")
    assert len(summary.decode_ids) == 1
    assert summary.prefill_ids == ()


def test_a_refused_request_is_covered(http: httpx.Client, mesh: MeshProcesses) -> None:
    def ask() -> str:
        answer = http.post("/v1/completions", json=_body(words=5000, tokens=10**6))
        assert answer.status_code == 400
        return str(answer.headers["x-request-id"])

    spans = _covered(ask, mesh, {"frontend.validate", "frontend.fail"})
    assert summary_of(spans).status == "refused"


def test_a_request_whose_client_leaves_is_covered(http: httpx.Client, mesh: MeshProcesses) -> None:
    def ask() -> str:
        with http.stream("POST", "/v1/completions", json=_body(tokens=2000, stream=True)) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("data:"):
                pass
            time.sleep(0.1)
            return str(answer.headers["x-request-id"])

    spans = _covered(ask, mesh, LOCAL)
    assert summary_of(spans).status == "cancelled"


def test_a_response_in_the_background_is_covered(http: httpx.Client, mesh: MeshProcesses) -> None:
    def ask() -> str:
        body = {"model": "mock", "input": secrets.token_hex(8), "max_output_tokens": 8, "background": True}
        answer = http.post("/v1/responses", json=body)
        assert answer.is_success, answer.text
        path = f"/v1/responses/{answer.json()['id']}"
        wait_until(lambda: http.get(path).json()["status"] in {"completed", "incomplete"})
        return str(answer.headers["x-request-id"])

    _covered(ask, mesh, LOCAL | {"frontend.store"})


def test_a_prompt_that_decode_computes_for_want_of_a_bootstrap_is_covered(
    http: httpx.Client, mesh: MeshProcesses
) -> None:
    mesh.start("prefill")
    wait_until(lambda: "decode.call_prefill" in _names(mesh, _ask(http)))
    spans = _covered(lambda: _ask(http), mesh, LOCAL | {"decode.call_prefill", "prefill.request"})
    assert [event.name for span in spans for event in span.events] == ["recompute"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disaggregated_request_is_covered(http: httpx.Client, mesh: MeshProcesses, stream: bool) -> None:
    if stream:
        mesh.start("bootstrap")
        wait_until(lambda: "decode.prefill" not in _names(mesh, _ask(http)))
    spans = _covered(lambda: _ask_prefill(http, mesh, stream=stream), mesh, EVERY | TRANSFER)
    assert len(summary_of(spans).prefill_ids) == 1
    assert "decode.prefill" not in names_of(spans)


def _names(mesh: MeshProcesses, request_id: str) -> set[str]:
    return names_of(whole_trace(mesh.home, request_id, EVERY))


def _ask_prefill(http: httpx.Client, mesh: MeshProcesses, **fields: Any) -> str:
    """A request whose prompt prefill computes: while that is stalled, decode computes prompts itself."""
    request_id = ""

    def goes_there() -> bool:
        nonlocal request_id
        request_id = _ask(http, **fields)
        return _goes_through_prefill(mesh, request_id)

    wait_until(goes_there)
    return request_id


def _goes_through_prefill(mesh: MeshProcesses, request_id: str) -> bool:
    """Wait for prefill's span, unless the prompt was computed on decode: it may be exported after all others."""
    if "decode.prefill" in _names(mesh, request_id):
        return False
    return bool(whole_trace(mesh.home, request_id, EVERY | {"prefill.request"}))


def test_a_prompt_whose_prefill_is_killed_is_covered(sampling: httpx.Client, mesh: MeshProcesses) -> None:
    def ask() -> str:
        mesh.start(*["prefill"] * (1 - _alive(mesh, "prefill")))
        _ask_prefill(sampling, mesh)
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(_ask, sampling, words=600, tokens=4)
            wait_until(lambda: _running(sampling, "prefill"))  # for this prompt it needs six seconds
            mesh.one("prefill").kill()
            return asked.result()

    spans = _covered(ask, mesh, LOCAL | {"prefill.request"})
    [lost] = [span for span in spans if span.name == "prefill.request"]
    assert (lost.status, lost.service.partition("-")[0]) == ("ERROR", "decode")


def test_a_stream_whose_decode_is_killed_is_covered(sampling: httpx.Client, mesh: MeshProcesses) -> None:
    """Spans of the killed process are lost: the frontend records that of the request in its place."""

    def ask() -> str:
        mesh.start(*["prefill"] * (1 - _alive(mesh, "prefill")), *["decode"] * (2 - _alive(mesh, "decode")))
        _ask_prefill(sampling, mesh)  # so that the lost process calls another one, which exports its spans
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(_ask, sampling, tokens=400)
            wait_until(lambda: _running(sampling, "decode"))
            instance = _running(sampling, "decode")
            time.sleep(0.5)
            [killed] = [worker for worker in mesh.workers if f'"instance": "{instance}"' in worker.logged()]
            killed.kill()
            return asked.result()

    spans = _covered(ask, mesh, EVERY)
    summary = summary_of(spans)
    assert (summary.moved, len(summary.decode_ids)) == (True, 2)
    [lost] = [span for span in spans if "kvmesh.lost" in span.attributes and span.name == "decode.request"]
    assert lost.service.startswith("frontend-")


def _alive(mesh: MeshProcesses, role: str) -> int:
    return sum(worker.role == role and worker.popen.poll() is None for worker in mesh.workers)


def _running(http: httpx.Client, role: str) -> str:
    """The instance of a role that computes for the only request."""
    workers = http.get("/workers").json()["data"]
    busy = [w["id"] for w in workers if w["role"] == role and w["load"] is not None and w["load"]["num_running"]]
    return str(busy[0]) if busy else ""
