"""Random, nearly valid requests: the frontend answers each with 200 or a named error."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.load.client import Run, exchange
from components.api_keys import parse_list
from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.completions import CompletionRequest
from components.openai.fields import parse_body
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.keys import KeyRing
from tests.components.text.tiny_model import tiny_text_model
from tests.fuzz.mutations import JSON, damaged, twisted
from tests.services.frontend.fake_mesh import MODEL, FakeMesh

KEY: Final = "sk-fuzz-0123456789"
COMMON: Final[dict[str, Any]] = {
    "model": MODEL, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": 7, "stream": False,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": 1.5}, "top_k": 5, "min_p": 0.1,
    "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [3], "cache_salt": "s", "priority": 1,
    "prompt_cache_key": "k", "user": "u",
}  # fmt: skip
CHAT: Final[dict[str, Any]] = {
    **COMMON,
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "metadata": {"a": "b"},
}
COMPLETION: Final[dict[str, Any]] = {**COMMON, "prompt": ["a", "b"], "echo": True, "logprobs": 1}
REQUESTS: Final = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


class Client:
    """A frontend over a mesh in memory, without sockets; one event loop for all examples."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.mesh = FakeMesh(tiny_text_model())
        keys = KeyRing(parse_list(f"fuzz:{KEY}"))
        self.app = create_app(self.mesh, self.mesh.text, FrontendSettings(max_body_bytes=64 * 1024), keys=keys)
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://fuzz",
            headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
        )

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self._runner.run(self._http.post(path, content=content))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with asyncio.Runner() as runner:
        yield Client(runner)


def check(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        assert '"error"' not in answer.text
        return
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 2000
    assert error["type"] == "invalid_request_error"
    assert len(error["param"] or "") <= 140


nearly_valid = st.sampled_from(sorted(REQUESTS)).flatmap(
    lambda path: st.tuples(st.just(path), twisted(REQUESTS[path], JSON, twists=2))
)
nearly_json = st.sampled_from(sorted(REQUESTS)).flatmap(
    lambda path: st.tuples(st.just(path), damaged(json.dumps(REQUESTS[path]).encode()))
)


def test_the_request_that_all_others_come_from_is_good(client: Client) -> None:
    for path, body in REQUESTS.items():
        assert client.post(path, json.dumps(body).encode()).status_code == 200


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request_=nearly_valid, stream=st.booleans())
def test_a_nearly_valid_request_is_answered_or_refused(client: Client, request_: tuple[str, Any], stream: bool) -> None:
    path, body = request_
    if isinstance(body, dict) and stream:
        body = {**body, "stream": True}
    check(client.post(path, json.dumps(body).encode()))
    assert client.mesh.running == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request_=nearly_json)
def test_a_damaged_request_is_answered_or_refused(client: Client, request_: tuple[str, bytes]) -> None:
    check(client.post(*request_))


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_request_or_rejected(body: bytes) -> None:
    for cls in (ChatRequest, CompletionRequest):
        with contextlib.suppress(Rejected):
            parse_body(cls, body)


STREAM: Final = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


@given(damaged(STREAM) | JSON.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n" + STREAM))
def test_the_load_generator_counts_a_broken_stream_as_failed_and_goes_on(data: bytes) -> None:
    async def run() -> Run:
        counted = Run()
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=data))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            await exchange(http, {"model": "m", "prompt": "a"}, counted)
        return counted

    counted = asyncio.run(run())
    assert counted.failed + len(counted.e2e_s) == 1
