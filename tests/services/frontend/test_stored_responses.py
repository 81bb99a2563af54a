"""Responses that are kept: over a real NATS, by two frontends of one mesh, as the openai package sees them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai as package
import pytest
from openai import AsyncOpenAI

from components.errors import DecodeLost
from components.http.server import serve_http
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.stored import StoredResponses, open_stored
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import PATIENCE_S, until

# clients are `Any`: what they answer is a union of thirty classes, of which a test looks at one
pytestmark = [pytest.mark.anyio, pytest.mark.mesh]
ANSWER = "The capital of France is Paris."
HELLO: dict[str, Any] = {"model": MODEL, "input": "Hello"}


@dataclass
class Served:
    url: str
    stored: StoredResponses
    stack: AsyncExitStack

    def client(self, key: str = "mine") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@asynccontextmanager
async def frontend(name: str, mesh: FakeMesh, settings: FrontendSettings) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect_bus(settings.nats_url, name))
        subject = f"{settings.namespace}.frontend.{name}"
        stored = await open_stored(bus, settings, subject)
        assert stored is not None
        await stack.enter_async_context(serve_calls(bus, "frontend", subject, [stored.endpoint()], {}))
        app = create_app(mesh, mesh.text, settings, stored=stored)
        url = await stack.enter_async_context(serve_http(app, settings))
        yield Served(url, stored, stack)


@pytest.fixture
def settings(nats_url: str, namespace: str) -> FrontendSettings:
    few = 1024 * 1024  # NATS sets them aside for each namespace
    return FrontendSettings(
        port=0, drain_timeout_s=1, nats_url=nats_url, namespace=namespace, stored_responses_bytes=few
    )


@pytest.fixture
async def here(mesh: FakeMesh, settings: FrontendSettings) -> AsyncIterator[AsyncOpenAI]:
    async with frontend("a", mesh, settings) as served, served.client() as client:
        yield client


@pytest.fixture
async def there(mesh: FakeMesh, settings: FrontendSettings) -> AsyncIterator[AsyncOpenAI]:
    async with frontend("b", mesh, settings) as served, served.client() as client:
        yield client


async def until_over(client: Any, response_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while (found := await client.responses.retrieve(response_id)).status == "in_progress":
            await asyncio.sleep(0.005)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_every_frontend_finds_a_response(here: Any, there: Any, stream: bool) -> None:
    if stream:
        async with here.responses.stream(**HELLO) as opened:
            made = await opened.get_final_response()
    else:
        made = await here.responses.create(**HELLO)
    found = await there.responses.retrieve(made.id)
    assert found.output_text == ANSWER
    assert found.to_dict() | {"output": None} == made.to_dict() | {"output": None}
    [item] = (await there.responses.input_items.list(made.id)).data
    assert (item.type, item.role, item.content[0].text, item.status) == ("message", "user", "Hello", "completed")


async def test_what_is_not_to_be_kept_is_not(here: Any) -> None:
    made = await here.responses.create(**HELLO, store=False)
    with pytest.raises(package.NotFoundError):
        await here.responses.retrieve(made.id)
    with pytest.raises(package.BadRequestError) as refused:
        await here.responses.create(**HELLO, previous_response_id=made.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_a_response_is_its_clients_own(mesh: FakeMesh, settings: FrontendSettings, here: Any, there: Any) -> None:
    made = await here.responses.create(**HELLO)
    stranger = there.with_options(api_key="another")
    for call in (stranger.responses.retrieve, stranger.responses.delete, stranger.responses.cancel):
        with pytest.raises(package.NotFoundError):
            await call(made.id)
    with pytest.raises(package.BadRequestError, match="not found"):
        await stranger.responses.create(**HELLO, previous_response_id=made.id)
    assert (await there.responses.retrieve(made.id)).id == made.id


async def test_a_conversation_goes_on_from_a_response(here: Any, there: Any, mesh: FakeMesh, text: TextModel) -> None:
    first = await here.responses.create(**HELLO, instructions="Be brief.")
    second = await there.responses.create(model=MODEL, input="And Spain?", previous_response_id=first.id)
    third = await here.responses.create(model=MODEL, input="Thanks.", previous_response_id=second.id)
    assert text.decode(mesh.prompts[2].token_ids) == (
        f"user\nHello\nassistant\n{ANSWER}\nuser\nAnd Spain?\nassistant\n{ANSWER}\nuser\nThanks.\nassistant\n"
    ), "instructions are for one request"
    assert third.previous_response_id == second.id
    await here.responses.delete(first.id)
    counted = await there.responses.input_tokens.count(input="Once more.", previous_response_id=third.id)
    await here.responses.create(model=MODEL, input="Once more.", previous_response_id=third.id)
    assert counted.input_tokens == len(mesh.prompts[-1].token_ids)
    assert [item.content[0].text for item in (await here.responses.input_items.list(third.id)).data] == ["Thanks."]


async def test_a_request_refers_to_items_of_stored_responses(
    here: Any, there: Any, mesh: FakeMesh, text: TextModel
) -> None:
    """The Vercel AI SDK sends earlier answers so; the second turn of each of its chats was refused."""
    made = await here.responses.create(**HELLO)
    reference = {"type": "item_reference", "id": made.output[0].id}
    hello, go_on = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Go on."}
    second = await there.responses.create(model=MODEL, input=[hello, reference, go_on])
    assert text.decode(mesh.prompts[1].token_ids) == (f"user\nHello\nassistant\n{ANSWER}\nuser\nGo on.\nassistant\n")
    listed = (await here.responses.input_items.list(second.id, order="asc")).data
    assert [item.content[0].text for item in listed] == ["Hello", ANSWER, "Go on."]
    await here.responses.delete(made.id)
    await there.responses.create(model=MODEL, input="Thanks.", previous_response_id=second.id)

    unstored = await here.responses.create(**HELLO, store=False)
    other = await here.responses.create(**HELLO)
    for client, ids in (
        (here, [unstored.output[0].id]),
        (here, [made.output[0].id]),
        (here, ["msg_1"]),
        (here, [other.output[0].id] * 2),
        (there.with_options(api_key="another"), [other.output[0].id]),
    ):
        references = [{"type": "item_reference", "id": item_id} for item_id in ids]
        with pytest.raises(package.BadRequestError, match="no stored response has an item") as refused:
            await client.responses.create(model=MODEL, input=[hello, *references])
        assert refused.value.param == f"input[{len(ids)}].id"


async def test_input_items_come_in_pages(here: Any) -> None:
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    made = await here.responses.create(model=MODEL, input=items)
    listed = here.responses.input_items
    assert [item.content[0].text async for item in listed.list(made.id, limit=2)] == list("43210")
    page = await listed.list(made.id, limit=2, order="asc")
    assert [item.content[0].text for item in page.data] == ["0", "1"]
    assert page.has_more
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nobody"}, {"include": ["a"]}):
        with pytest.raises(package.BadRequestError):
            await listed.list(made.id, **query)
    with pytest.raises(package.BadRequestError, match="stream"):
        await here.responses.retrieve(made.id, stream=True)


async def test_pages_end_if_items_share_an_id(here: Any) -> None:
    """The second page began after the first item with this id, so no client reached the end."""
    items = [{"role": "user", "content": str(i), "id": "msg_1"} for i in range(5)]
    made = await here.responses.create(model=MODEL, input=items)
    listed = [item async for item in here.responses.input_items.list(made.id, limit=2, order="asc")]
    assert [item.content[0].text for item in listed] == list("01234")
    assert (listed[0].id, len({item.id for item in listed})) == ("msg_1", 5)


async def test_a_deleted_response_is_gone(here: Any, there: Any) -> None:
    made = await here.responses.create(**HELLO)
    await there.responses.delete(made.id)
    for call in (here.responses.retrieve, here.responses.delete, here.responses.cancel):
        with pytest.raises(package.NotFoundError):
            await call(made.id)
    with pytest.raises(package.NotFoundError):
        await here.responses.retrieve("resp_*")


async def test_one_in_the_background_goes_on_without_its_client(here: Any, there: Any, mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    async with here:
        made = await here.responses.create(**HELLO, background=True)
        assert (made.status, made.background, made.output) == ("in_progress", True, [])
    # its connection is closed by now
    assert (await there.responses.retrieve(made.id)).status == "in_progress"
    with pytest.raises(package.BadRequestError, match="not ended yet"):
        await there.responses.create(**HELLO, previous_response_id=made.id)
    for _ in range(100):
        mesh.gate.release()
    found = await until_over(there, made.id)
    assert (found.status, found.output_text) == ("completed", ANSWER)
    assert found.usage is not None
    assert mesh.cancelled == 0
    assert (await there.responses.cancel(made.id)).status == "completed", "what is over stays what it is"


async def test_another_frontend_cancels_one_in_the_background(here: Any, there: Any, mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(2)
    made = await here.responses.create(**HELLO, background=True)
    await until(lambda: mesh.deltas == 2)
    cancelled = await there.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    await mesh.until_idle()
    assert (mesh.cancelled, mesh.deltas) == (1, 2)
    assert (await here.responses.retrieve(made.id)).status == "cancelled"
    other = await here.responses.create(**HELLO, background=True)
    await there.responses.delete(other.id)
    await mesh.until_idle()
    with pytest.raises(package.NotFoundError):
        await here.responses.retrieve(other.id)


async def test_one_that_is_not_in_the_background_cannot_be_cancelled(here: Any) -> None:
    made = await here.responses.create(**HELLO)
    with pytest.raises(package.BadRequestError, match="in the background"):
        await here.responses.cancel(made.id)


async def test_one_in_the_background_whose_worker_is_lost_has_failed(here: Any, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 2, DecodeLost("10.0.0.7 gone")
    made = await here.responses.create(**HELLO, background=True)
    found = await until_over(here, made.id)
    assert (found.status, found.error.code) == ("failed", "server_error")
    async with httpx.AsyncClient(base_url=str(here.base_url).removesuffix("v1/"), timeout=PATIENCE_S) as http:
        counted = (await http.get("/metrics")).text
    assert 'route="/v1/responses",status="502"} 1.0' in counted, "it was counted as a success"
    assert "lost" in found.error.message
    assert "10.0.0.7" not in found.to_json()


async def test_one_whose_frontend_is_gone_has_failed(there: Any, mesh: FakeMesh, settings: FrontendSettings) -> None:
    mesh.gate = asyncio.Semaphore(0)
    async with frontend("gone", mesh, settings) as served, served.client() as client:
        made = await client.responses.create(**HELLO, background=True)
        assert (await there.responses.retrieve(made.id)).status == "in_progress"
    found = await there.responses.retrieve(made.id)
    assert (found.status, found.error.code) == ("failed", "server_error")


async def test_a_wrong_request_in_the_background_is_refused_at_once(here: Any, mesh: FakeMesh) -> None:
    for wrong in ({"model": "nobody"}, {"input": "word " * 600}, {"temperature": 9}):
        with pytest.raises(package.APIStatusError):
            await here.responses.create(**{**HELLO, **wrong}, background=True)
    assert not mesh.prompts


async def test_the_oldest_is_forgotten(mesh: FakeMesh, settings: FrontendSettings) -> None:
    few = settings.model_copy(update={"max_stored_responses": 2})
    async with frontend("few", mesh, few) as served, served.client() as client:
        made = [(await client.responses.create(**HELLO)).id for _ in range(3)]
        with pytest.raises(package.NotFoundError):
            await client.responses.retrieve(made[0])
        for known in made[1:]:
            assert (await client.responses.retrieve(known)).id == known


async def test_one_too_large_to_keep_is_answered_and_says_so(
    here: Any, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.messaging.records.HEADERS_BYTES", 8 * 1024 * 1024 - 100)
    made = await here.responses.create(**HELLO)
    assert (made.output_text, made.to_dict()["store"]) == (ANSWER, False)
    with pytest.raises(package.APIStatusError) as refused:
        await here.responses.create(**HELLO, background=True)
    assert refused.value.status_code == 413
    assert len(mesh.prompts) == 1


async def test_a_frontend_that_is_to_keep_none_keeps_none(nats_url: str, namespace: str) -> None:
    none = FrontendSettings(nats_url=nats_url, namespace=namespace, max_stored_responses=0)
    async with connect_bus(nats_url, "none") as bus:
        assert await open_stored(bus, none, "subject") is None


async def test_other_bounds_of_the_next_frontend_hold(mesh: FakeMesh, settings: FrontendSettings, here: Any) -> None:
    made = await here.responses.create(**HELLO)
    fewer = settings.model_copy(update={"stored_responses_age_s": 0.2})
    async with frontend("fewer", mesh, fewer) as served, httpx.AsyncClient(base_url=served.url) as http:
        async with asyncio.timeout(PATIENCE_S):
            url, auth = f"/v1/responses/{made.id}", {"authorization": "Bearer mine"}
            while (await http.get(url, headers=auth, timeout=PATIENCE_S)).status_code != 404:
                await asyncio.sleep(0.05)
