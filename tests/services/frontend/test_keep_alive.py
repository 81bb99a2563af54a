"""Comments in a stream that is silent, so that no proxy closes its connection as idle."""

import asyncio
import json

import httpx
import pytest

from components.errors import PrefillLost
from services.frontend.config import FrontendSettings
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.raw_http import post
from tests.services.frontend.test_admission_http import EMPTY, FULL, until_waiting
from tests.services.frontend.test_operations import value_of
from tests.services.frontend.test_streaming import CHAT, HELLO, ROUTES
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
COMMENT = b": keep-alive\n\n"


@pytest.fixture
def settings() -> FrontendSettings:
    return FrontendSettings(port=0, drain_timeout_s=2, keep_alive_s=0.01)


async def streamed(http: httpx.AsyncClient, mesh: FakeMesh, route: str, comments: int) -> tuple[httpx.Response, bytes]:
    """Return an answer that begins after `comments` comments."""
    assert mesh.gate is not None
    received = b""
    asked = {"model": MODEL, **ROUTES[route], "stream": True}
    async with asyncio.timeout(PATIENCE_S), http.stream("POST", route, json=asked) as answer:
        async for data in answer.aiter_raw():
            received += data
            if received.count(COMMENT) == comments:
                for _ in range(100):
                    mesh.gate.release()
    return answer, received


@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_a_stream_without_events_gets_comments(http: httpx.AsyncClient, mesh: FakeMesh, route: str) -> None:
    mesh.gate = asyncio.Semaphore(100)
    _, plain = await streamed(http, mesh, route, 0)
    mesh.gate = asyncio.Semaphore(0)
    answer, received = await streamed(http, mesh, route, 3)
    assert (answer.status_code, received.count(COMMENT)) == (200, 3)
    events = received.replace(COMMENT, b"")
    assert received.startswith(3 * COMMENT)
    assert events.count(b"data: ") == plain.count(b"data: ")
    count = f'kvmesh_time_to_first_token_seconds_count{{model_name="{MODEL}",route="{route}"}}'
    assert await value_of(http, count) == 2


async def test_a_pause_between_tokens_gets_comments_too(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(2)
    _, received = await streamed(http, mesh, CHAT, 2)
    assert received.index(b"data: ") < received.index(COMMENT)
    assert b"[DONE]" in received


async def test_a_queued_stream_gets_comments(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fleet = FULL
    received = b""
    async with asyncio.timeout(PATIENCE_S), http.stream("POST", CHAT, json=HELLO) as answer:
        await until_waiting(http, 1)
        async for data in answer.aiter_raw():
            received += data
            if received.count(COMMENT) == 2:
                mesh.fleet = EMPTY
    assert received.startswith(2 * COMMENT)
    assert received.endswith(b"[DONE]\n\n")


async def test_a_client_that_leaves_the_queue_is_not_answered(
    url: str, http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.fleet = FULL
    reader, writer = await post(url, CHAT, HELLO)
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(COMMENT)
    writer.close()
    await until_waiting(http, 0)
    mesh.fleet = EMPTY
    assert not mesh.prompts
    assert await value_of(http, f'kvmesh_requests_total{{model_name="{MODEL}",route="{CHAT}",status="499"}}') == 1


@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_a_failure_after_a_comment_is_an_event(http: httpx.AsyncClient, mesh: FakeMesh, route: str) -> None:
    mesh.fleet, mesh.fail_at, mesh.failure = FULL, 0, PrefillLost("gone")
    received = b""
    asked = {"model": MODEL, **ROUTES[route], "stream": True}
    async with asyncio.timeout(PATIENCE_S), http.stream("POST", route, json=asked) as answer:
        async for data in answer.aiter_raw():
            received += data
            mesh.fleet = EMPTY
    assert (answer.status_code, received.startswith(COMMENT)) == (200, True)
    events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
    assert any("error" in event or event["type"] == "error" for event in events)
    assert await value_of(http, f'kvmesh_requests_total{{model_name="{MODEL}",route="{route}",status="502"}}') == 1


async def test_an_answer_that_is_not_streamed_has_no_comments(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    asked = asyncio.create_task(http.post(CHAT, json={**HELLO, "stream": False}))
    await until(lambda: mesh.running)
    await asyncio.sleep(0.05)  # the time of several comments
    for _ in range(100):
        mesh.gate.release()
    assert (await asked).json()["choices"][0]["message"]["content"] == mesh.answer
