import asyncio
import json
from typing import Any

import httpx
import pytest

from components.errors import DecodeLost, InvariantBroken, PrefillLost
from components.http.server import serve_http
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.raw_http import post
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO["messages"]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 200},
    "/v1/responses": {"input": "Hello"},
}


async def events_of(answer: httpx.Response) -> list[str]:
    return [event.removeprefix("data: ") for event in (await answer.aread()).decode().split("\n\n") if event]


async def test_the_stream_has_openais_shape(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", CHAT, json=HELLO) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert len(answer.headers["x-request-id"]) == 32
        *chunks, done = await events_of(answer)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parsed[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in chunk for chunk in parsed)


async def test_each_token_arrives_before_the_next_is_made(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    received = b""
    mesh.gate.release()
    async with asyncio.timeout(PATIENCE_S), http.stream("POST", CHAT, json=HELLO) as answer:
        async for data in answer.aiter_raw():
            received += data
            if received.count(b'"delta":{"content":') == mesh.deltas:
                mesh.gate.release()  # only what was made so far has arrived, and all of it
    assert received.count(b'"delta":{"content":') == mesh.deltas > 3


async def test_one_delta_of_many_tokens_is_one_event(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.tokens_per_delta = 1000
    async with http.stream("POST", CHAT, json=HELLO) as answer:
        events = await events_of(answer)
    assert len(events) == 4  # role, text, finish, [DONE]


async def test_the_first_token_is_not_kept_waiting_for_text(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.answer, mesh.gate = "👩", asyncio.Semaphore(1)  # its first token alone is no character
    async with asyncio.timeout(PATIENCE_S), http.stream("POST", CHAT, json=HELLO) as answer:
        assert b'"role":"assistant"' in await anext(answer.aiter_raw())
    await mesh.until_idle()


async def test_clients_that_cut_at_any_line_end_read_the_text_too(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.answer = "a\u2028b\u2029c\x85d"
    async with http.stream("POST", CHAT, json=HELLO) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == mesh.answer


async def test_a_failure_in_mid_stream_is_an_event_before_done(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 2, PrefillLost("10.0.0.7 gone")
    async with http.stream("POST", CHAT, json=HELLO) as answer:
        assert answer.status_code == 200
        *_, failure, done = await events_of(answer)
    error = json.loads(failure)["error"]
    assert done == "[DONE]"
    assert (error["type"], error["code"], error["param"]) == ("server_error", "instance_lost", None)
    assert answer.headers["x-request-id"] in error["message"]
    assert "10.0.0.7" not in failure


async def test_a_bug_in_mid_stream_tells_only_the_request_id(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.fail_at, mesh.failure = 2, ZeroDivisionError("secret")
    async with http.stream("POST", CHAT, json=HELLO) as answer:
        *_, failure, done = await events_of(answer)
    assert done == "[DONE]"
    assert "secret" not in failure
    assert answer.headers["x-request-id"] in json.loads(failure)["error"]["message"]
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize("tokens_seen", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_a_client_that_leaves_cancels_the_work_before_another_token(
    url: str, http: httpx.AsyncClient, mesh: FakeMesh, route: str, stream: bool, tokens_seen: int
) -> None:
    mesh.gate = asyncio.Semaphore(tokens_seen)
    _, writer = await post(url, route, {"model": MODEL, **ROUTES[route], "stream": stream})
    await until(lambda: mesh.deltas == tokens_seen and mesh.running)
    writer.close()
    await mesh.until_idle()
    assert (mesh.cancelled, mesh.deltas) == (1, tokens_seen)
    metrics = (await http.get("/metrics")).text
    assert f'kvmesh_requests_total{{model_name="{MODEL}",route="{route}",status="499"}} 1.0' in metrics
    assert f'kvmesh_num_requests_running{{model_name="{MODEL}"}} 0.0' in metrics


async def test_a_connection_serves_the_next_request_after_a_stream(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    for _ in range(5):
        async with http.stream("POST", CHAT, json=HELLO) as answer:
            assert (await events_of(answer))[-1] == "[DONE]"
    assert mesh.cancelled == 0


async def test_a_failure_after_the_last_token_changes_nothing(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.answer = "a"

    class FailsLate(FakeMesh):
        async def _deltas(self, prompt: Any, branch: int) -> Any:
            async for delta in super()._deltas(prompt, branch):
                yield delta
            raise DecodeLost("gone after all was said")

    late = FailsLate(mesh.text, answer="a")
    settings = FrontendSettings(port=0)
    async with (
        serve_http(create_app(late, mesh.text, settings), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        client.stream("POST", CHAT, json=HELLO) as answer,
    ):
        assert (await events_of(answer))[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_over_its_time_limit_is_cancelled(mesh: FakeMesh, text: TextModel, stream: bool) -> None:
    mesh.gate = asyncio.Semaphore(2)
    settings = FrontendSettings(port=0, request_timeout_s=1.0)  # the stream begins within it
    async with (
        serve_http(create_app(mesh, text, settings), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        client.stream("POST", CHAT, json={**HELLO, "stream": stream}) as answer,
    ):
        if stream:
            *_, failure, done = await events_of(answer)
            assert done == "[DONE]"
        else:
            assert answer.status_code == 504
            failure = (await answer.aread()).decode()
    assert json.loads(failure)["error"]["code"] == "deadline_exceeded"
    assert mesh.running == 0
    assert mesh.cancelled == 1


async def test_a_defect_of_the_mesh_before_the_first_token_is_an_error(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 0, InvariantBroken("a stream's reader: ...")
    for stream in (False, True):
        answer = await http.post(CHAT, json={**HELLO, "stream": stream})
        assert answer.status_code == 500
