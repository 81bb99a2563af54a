"""Admission as clients see it: they wait, and then stream; or 429 and when to come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import pytest
from openai import AsyncOpenAI, RateLimitError

from components.http.server import serve_http
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import FleetRoom
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.raw_http import post
from tests.services.frontend.test_operations import value_of
from tests.services.frontend.test_request_spans import by_name
from tests.services.frontend.test_streaming import HELLO as STREAMED
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
CHAT: Final = "/v1/chat/completions"
HELLO: Final[dict[str, Any]] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
FULL: Final = FleetRoom(2000, 1000, 0)
EMPTY: Final = FleetRoom(0, 1000, 0)


@asynccontextmanager
async def served(mesh: FakeMesh, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    limits = FrontendSettings(port=0, drain_timeout_s=2, **settings)
    async with (
        serve_http(create_app(mesh, mesh.text, limits), limits) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client


async def until_waiting(http: httpx.AsyncClient, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await value_of(http, "kvmesh_num_requests_waiting") != number:
            await asyncio.sleep(0.001)


async def test_a_full_queue_is_429_with_when_to_come_back(mesh: FakeMesh) -> None:
    mesh.fleet = FULL
    async with served(mesh, queue_tokens=100) as http:
        first = asyncio.create_task(http.post(CHAT, json=HELLO))
        await until_waiting(http, 1)
        answer = await http.post(CHAT, json=HELLO)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("tokens", None, "rate_limit_exceeded")
        assert await value_of(http, 'kvmesh_requests_refused_total{reason="full"}') == 1
        async with AsyncOpenAI(
            base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            with pytest.raises(RateLimitError):  # a key of its own, with as much as the one who waits
                await client.chat.completions.create(**HELLO)
        mesh.fleet = EMPTY
        assert (await first).status_code == 200
        assert len(mesh.prompts) == 1


async def test_one_who_has_waited_too_long_is_429_too(mesh: FakeMesh) -> None:
    mesh.fleet = FULL
    async with served(mesh, queue_timeout_s=0.05) as http:
        answer = await http.post(CHAT, json=HELLO)
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        assert await value_of(http, 'kvmesh_requests_refused_total{reason="age"}') == 1
        assert "kvmesh_prompt_tokens_total{" not in (await http.get("/metrics")).text, "its tokens were not computed"
        assert not mesh.prompts


async def test_a_request_waits_for_room_and_then_streams(mesh: FakeMesh, spans: Any) -> None:
    mesh.fleet = FULL
    async with served(mesh) as http:
        waits = asyncio.create_task(http.post(CHAT, json=STREAMED))
        await until_waiting(http, 1)
        assert not mesh.prompts
        mesh.fleet = EMPTY
        assert (await waits).text.endswith("data: [DONE]\n\n")
        assert await value_of(http, "kvmesh_request_queue_time_seconds_count") == 1
        assert await value_of(http, 'kvmesh_request_queue_time_seconds_bucket{le="0.0"}') == 0
    found = by_name(spans)
    admit, tokenize = found["frontend.admit"], found["frontend.tokenize"]
    assert admit.start_time is not None
    assert admit.parent == tokenize.parent
    assert admit.start_time >= (tokenize.end_time or 0)


async def test_the_time_limit_of_a_request_runs_while_it_waits(mesh: FakeMesh) -> None:
    mesh.fleet = FULL
    async with served(mesh, request_timeout_s=0.1) as http:
        answer = await http.post(CHAT, json=HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert await value_of(http, "kvmesh_num_requests_waiting") == 0


async def test_a_client_that_leaves_waits_no_more(mesh: FakeMesh) -> None:
    mesh.fleet = FULL
    async with served(mesh) as http:
        _, writer = await post(str(http.base_url), CHAT, HELLO)
        await until_waiting(http, 1)
        writer.close()
        await until_waiting(http, 0)
        assert await value_of(http, f'kvmesh_requests_total{{model_name="{MODEL}",route="{CHAT}",status="499"}}') == 1
        mesh.fleet = EMPTY
        assert (await http.post(CHAT, json=HELLO)).status_code == 200
        assert len(mesh.prompts) == 1


async def test_priority_goes_before_the_share_of_keys_and_that_before_arrival(mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    came = [("a", 1), ("a", 0), ("a", 0), ("b", 0), ("c", -1)]
    async with served(mesh, max_inflight=1) as http:
        requests = [asyncio.create_task(http.post(CHAT, json=HELLO))]
        await until(lambda: mesh.prompts)
        for number, (key, priority) in enumerate(came):
            body = {**HELLO, "priority": priority, "seed": number}
            headers = {"authorization": f"Bearer {key}"}
            requests.append(asyncio.create_task(http.post(CHAT, json=body, headers=headers)))
            await until_waiting(http, number + 1)
        for _ in range(1000):
            mesh.gate.release()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
    assert [(prompt.sampling.seed, prompt.priority) for prompt in mesh.prompts[1:]] == [
        (4, -1),
        (1, 0),
        (3, 0),
        (2, 0),
        (0, 1),
    ]
