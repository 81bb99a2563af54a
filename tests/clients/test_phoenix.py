"""Arize Phoenix, a foreign receiver of OTLP, takes the spans of a mesh and shows the tree that our own store shows."""

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.processes import free_port
from components.settings import MeshSettings
from components.telemetry.stored_spans import Span
from components.telemetry.trace_reader import LocalTraceReader, open_trace_reader
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.trace_checks import whole_trace
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.clients, pytest.mark.mesh, pytest.mark.timeout(900)]  # the first run installs packages

START_S: Final = 120.0
NAMES: Final = {"frontend.stream", "decode.generate", "prefill.inflight", "bootstrap.open"}


@pytest.fixture
def receiver(phoenix: Path, tmp_path: Path) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    env = {
        **os.environ,
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_WORKING_DIR": str(tmp_path / "phoenix"),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    url, log = f"http://127.0.0.1:{port}", tmp_path / "phoenix.log"
    with (
        log.open("wb") as stream,
        subprocess.Popen([phoenix, "serve"], env=env, stdout=stream, stderr=stream) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while not _answers(url):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False


def test_phoenix_shows_the_tree_of_a_request(receiver: str, etcd_url: str, nats_url: str, tmp_path: Path) -> None:
    env = {**MOCK_ENV, "MESH_OTLP_ENDPOINT": receiver, "MESH_TRACES_PER_S": "inf"}
    home = tmp_path / "mesh"
    home.mkdir()
    with MeshProcesses(etcd_url, nats_url, f"phoenix-{secrets.token_hex(3)}", home, "mock", env) as mesh:
        mesh.start("bootstrap", "prefill", "decode")
        frontend = mesh.start_one("frontend")
        ours = _traced(frontend.url, home)
    theirs = _shown(receiver, len(ours), ours[0].trace_id)
    assert _tree(theirs) == {span.span_id: (span.name, span.parent_id) for span in ours}
    [root] = [span for span in theirs if not span["parent_id"]]
    [own_root] = [span for span in ours if span.parent_id is None]
    assert root["attributes"]["kvmesh.request_id"] == own_root.attributes["kvmesh.request_id"]
    # it is no observer of ours, so each process wrote its file, too
    assert isinstance(open_trace_reader(MeshSettings(otlp_endpoint=receiver, state_dir=home)), LocalTraceReader)


def _traced(url: str, home: Path) -> list[Span]:
    """The spans of a request that prefill computed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        body = {"model": "mock", "prompt": secrets.token_hex(40), "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        if answer.is_success:
            spans = whole_trace(home, answer.headers["x-request-id"], {"frontend.stream", "decode.generate"})
            if {span.name for span in spans} >= NAMES:
                return spans
        assert time.monotonic() < deadline, answer.text


def _shown(receiver: str, count: int, trace_id: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.get(f"{receiver}/v1/projects/default/spans", params={"limit": 1000}, timeout=PATIENCE_S)
        spans = [span for span in answer.json().get("data", []) if span["context"]["trace_id"] == trace_id]
        if len(spans) >= count:
            return spans
        assert time.monotonic() < deadline, f"{len(spans)} of {count} spans: {answer.text[:1000]}"
        time.sleep(0.5)  # Phoenix inserts spans in the background


def _tree(spans: list[dict[str, Any]]) -> dict[str, tuple[str, str | None]]:
    return {span["context"]["span_id"]: (span["name"], span["parent_id"] or None) for span in spans}
