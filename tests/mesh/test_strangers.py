"""One API key sees nothing of another one, through real processes with mock engines."""

import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from components.telemetry.trace_store import TraceStore
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MODEL
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

RESPONSES: Final = "/v1/responses"
KEYS: Final = {name: f"sk-{name}-0123456789abcdef" for name in ("alice", "bob")}
TRACE_ID: Final = "ab" * 16
TRACES_PER_S: Final = 1
BURST_S: Final = 10


@pytest.fixture
def http(mock_mesh: MeshProcesses) -> Iterator[httpx.Client]:
    pace = {"SPEEDUP": "1", "STEP_S": "0.005", "PROMPT_TOKEN_S": "0", "ANSWER_TOKENS": "0"}
    mock_mesh.start(
        "decode",
        "frontend",
        MESH_FRONTEND_API_KEYS=",".join(f"{name}:{key}" for name, key in KEYS.items()),
        MESH_TRACES_PER_S=str(TRACES_PER_S),
        MESH_FRONTEND_SLOW_TTFT_S="60",  # none is kept as slow
        MESH_DECODE_MAX_LOCAL_PREFILL="4096",
        **{f"MESH_ENGINE__MOCK__{name}": value for name, value in pace.items()},
    )
    with httpx.Client(base_url=mock_mesh.one("frontend").url, timeout=PATIENCE_S) as client:
        wait_until(lambda: client.get("/v1/models", headers=of("alice")).json()["data"])
        yield client


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[key]}"}


def cached_tokens(http: httpx.Client, key: str) -> int:
    body = {"model": MODEL, "prompt": "The merger closes on Tuesday. " * 12, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers=of(key))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def stored(http: httpx.Client, **fields: Any) -> str:
    answer = http.post(RESPONSES, json={"model": MODEL, "input": "secret", **fields}, headers=of("alice"))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_another_key_sees_no_prefix_no_response_and_no_more_traces(
    http: httpx.Client, mock_mesh: MeshProcesses
) -> None:
    """One key's `cached_tokens` revealed another's prompts, and a client's `traceparent` passed the rate limit of traces."""
    assert cached_tokens(http, "alice") == 0
    assert cached_tokens(http, "alice") > 0
    assert cached_tokens(http, "bob") == 0

    kept = stored(http, max_output_tokens=4)
    running = stored(http, max_output_tokens=4000, background=True)
    for response in (kept, running):
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            answer = http.request(method, f"{RESPONSES}/{response}{path}", headers=of("bob"))
            assert answer.status_code == 404, (method, path, answer.text)
            assert "secret" not in answer.text
    odd = ["resp_*", "resp_>", "*", ">", "$KV", "_", "%2e%2e/x", f"{kept}%00", f"{kept}%0a", f"{kept}.>"]
    for name in (*odd, kept.upper(), "resp_" + "a" * 3000):
        assert http.get(f"{RESPONSES}/{name}", headers=of("alice")).status_code == 404, name
    assert http.get(f"{RESPONSES}/{running}", headers=of("alice")).json()["status"] == "in_progress"
    assert http.post(f"{RESPONSES}/{running}/cancel", headers=of("alice")).json()["status"] == "cancelled"

    began = time.monotonic()
    for _ in range(200):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        answer = http.post(
            "/v1/completions", json=body, headers=of("bob") | {"traceparent": f"00-{TRACE_ID}-{'cd' * 8}-01"}
        )
        assert answer.status_code == 200
    most = TRACES_PER_S * (BURST_S + time.monotonic() - began + 1)
    time.sleep(1)  # until the last spans are on disk
    spans = TraceStore(mock_mesh.home).trace(TRACE_ID)
    assert sum(span.name.startswith("text_completion") for span in spans) <= most
