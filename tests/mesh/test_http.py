"""A user's view: the openai package, curl, and the trace of a request, against the whole mesh with the real model."""

import subprocess
import time
from collections import Counter
from itertools import pairwise
from typing import Any, Final

import httpx
import pytest
from openai import OpenAI

from tests.mesh.harness import MeshProcesses
from tests.mesh.trace_checks import covered_trace
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.model]

MODEL: Final = "smollm2-135m"
STEPS: Final = (  # of a disaggregated request, each exactly once
    "frontend.validate",
    "frontend.tokenize",
    "frontend.route",
    "frontend.dispatch",
    "decode.request",
    "decode.lookup",
    "decode.choose_prefill",
    "decode.reserve",
    "decode.call_prefill",
    "prefill.request",
    "prefill.bootstrap",
    "prefill.queue",
    "prefill.compute",
    "decode.open_room",
    "bootstrap.open",
    "prefill.transfer",
    "prefill.inflight",
    "decode.receive",
    "decode.first_token",
    "frontend.receive",
    "frontend.first_token",
    "frontend.stream",
    "decode.generate",
)


@pytest.fixture(scope="module")
def url(real_mesh: MeshProcesses) -> str:
    frontend = real_mesh.one("frontend")
    wait_until(frontend.models)
    return frontend.url


def test_the_openai_package_streams_a_chat(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Name the capital of France."}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (36, 8)


def test_curl_shows_tokens_as_they_are_made(url: str) -> None:
    """A stalled reader gets several events at once: one of three tries must show them one by one."""
    tries = [_gaps(url)]
    while not _one_by_one(tries[-1]):
        assert len(tries) < 3, f"events came together: {tries}"
        tries.append(_gaps(url))


def _gaps(url: str) -> list[float]:
    """Return the seconds between the events of a stream, as curl shows them."""
    body = f'{{"model":"{MODEL}","prompt":"Once upon a time","max_tokens":24,"stream":true,"ignore_eos":true}}'
    command = ["curl", "-sN", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        arrivals = [time.monotonic() for line in curl.stdout if line.startswith(b"data: {")]
    assert len(arrivals) >= 12
    return [later - earlier for earlier, later in pairwise(arrivals)]


def _one_by_one(gaps: list[float]) -> bool:
    return sum(gap > 0.004 for gap in gaps) >= len(gaps) // 2


def test_stop_strings_seeds_and_limits_are_honoured(url: str) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": "1, 2, 3,", **fields}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        answer.raise_for_status()
        return dict(answer.json()["choices"][0])

    counted = ask(temperature=0, max_tokens=24)["text"]
    assert " 6," in counted
    stopped = ask(temperature=0, max_tokens=24, stop=[" 6"])
    assert (stopped["text"], stopped["finish_reason"]) == (counted[: counted.index(" 6")], "stop")
    assert ask(temperature=0, max_tokens=3)["finish_reason"] == "length"
    assert ask(seed=7, max_tokens=16)["text"] == ask(seed=7, max_tokens=16)["text"]


def test_errors_have_the_shape_that_clients_know(url: str) -> None:
    def code(expected_status: int, **fields: Any) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == expected_status, answer.text
        return str(answer.json()["error"]["code"])

    assert code(404, model="gpt-5") == "model_not_found"
    assert code(400, messages=[]) != ""
    assert code(400, max_tokens=100_000) == "context_length_exceeded"
    how: dict[str, Any] = {"headers": {"content-type": "application/json"}, "timeout": PATIENCE_S}
    broken = httpx.post(f"{url}/v1/chat/completions", content=b"{", **how)
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"


def test_a_trace_holds_every_step_once_and_covers_the_time_to_the_first_token(
    url: str, real_mesh: MeshProcesses
) -> None:
    def ask() -> str:
        question = f"Tell me a story about the number {time.time_ns()}, in which a long sentence goes on and on. " * 8
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
            answer.read()
            return str(answer.headers["x-request-id"])

    spans = covered_trace(ask, real_mesh.home, STEPS)
    counts = Counter(s.name for s in spans)
    assert {name: counts[name] for name in STEPS} == dict.fromkeys(STEPS, 1)
    assert len({s.trace_id for s in spans}) == 1
    assert counts.total() == len(STEPS) + 1, f"and the root, nothing else: {counts}"
