"""Long answers in one piece: written part by part, between which the event loop serves others."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from threading import current_thread, main_thread
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import BaseModel
from starlette.types import Message

from components.http.limits import ClientLimits
from components.http.server import serve_http
from components.openai.embeddings import EmbeddingList
from components.openai.parts import AT_ONCE_BYTES, PART, filled, items_of, text_filled
from components.openai.tokens import Detokenized, Tokenized
from components.text.tokenizer import INLINE_CHARS, TextModel
from components.wire.embed import EmbeddingModel
from services.frontend import embeddings
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import FakeMesh, vector_of
from tests.services.frontend.raw_http import post
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
EMBED = "embedder"
SIZE = 2048
SETTINGS = FrontendSettings(port=0, drain_timeout_s=2)


@pytest.fixture
def mesh(text: TextModel) -> FakeMesh:
    embedding = EmbeddingModel(dimensions=SIZE, normalised=True)
    return FakeMesh(text, served=[ServedModel(EMBED, 512, 1, embedding=embedding)])


class Answer:
    """Body by body as an application sends it, with the turns that the event loop had until then."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.turns: list[int] = []

    async def of(self, mesh: FakeMesh, path: str, body: dict[str, Any]) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async def receive() -> Message:
            if sent:
                await asyncio.Event().wait()
            sent.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200
            elif message.get("body"):
                self.bodies.append(message["body"])
                self.turns.append(turns)

        sent: list[bool] = []
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        headers = {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"}
        counting = asyncio.create_task(count())
        try:
            await create_app(mesh, mesh.text, SETTINGS)({**scope, **headers}, receive, send)
        finally:
            counting.cancel()


def requests() -> dict[str, dict[str, Any]]:
    return {
        "/v1/embeddings": {"model": EMBED, "input": ["Hello"] * 64},
        "/tokenize": {"prompt": "Hello Paris " * 20_000, "return_token_strs": True},
        "/detokenize": {"tokens": [5, 6, 7, 300] * 50_000},
    }


@pytest.mark.parametrize("path", sorted(requests()))
async def test_others_get_their_turn_between_the_parts_of_a_long_answer(mesh: FakeMesh, path: str) -> None:
    answer = Answer()
    await answer.of(mesh, path, requests()[path])
    assert len(answer.bodies) > 2
    assert max(map(len, answer.bodies)) < 2 * AT_ONCE_BYTES
    assert all(later > earlier for earlier, later in zip(answer.turns, answer.turns[1:], strict=False))
    json.loads(b"".join(answer.bodies))


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_http(create_app(mesh, mesh.text, SETTINGS), SETTINGS) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client


async def test_a_long_answer_arrives_whole(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    asked = requests()
    embedded = EmbeddingList.model_validate_json((await http.post("/v1/embeddings", json=asked["/v1/embeddings"])).text)
    vector = np.frombuffer(vector_of(mesh.text._encode("Hello", add_special_tokens=True), SIZE), "<f4").tolist()
    assert [(item.index, item.embedding) for item in embedded.data] == [(i, vector) for i in range(64)]
    tokenized = Tokenized.model_validate_json((await http.post("/tokenize", json=asked["/tokenize"])).text)
    assert tokenized.tokens == mesh.text._encode(asked["/tokenize"]["prompt"], add_special_tokens=True)
    assert (tokenized.count, tokenized.token_strs) == (len(tokenized.tokens), mesh.text.names(tokenized.tokens))
    text = (await http.post("/detokenize", json=asked["/detokenize"])).json()
    assert text == {"prompt": mesh.text.decode(asked["/detokenize"]["tokens"], skip=False)}


async def test_a_client_that_leaves_ends_the_writing_of_a_long_answer(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = asyncio.Event()

    def endless(*_: Any) -> Iterator[bytes]:
        try:
            while True:
                yield bytes(AT_ONCE_BYTES)
        finally:
            over.set()

    monkeypatch.setattr(embeddings, "embedding_list", endless)
    limits = ClientLimits(unread_s=1000.0)
    async with serve_http(create_app(mesh, mesh.text, SETTINGS), SETTINGS, limits=limits) as url:
        reader, writer = await post(url, "/v1/embeddings", requests()["/v1/embeddings"])
        await reader.readexactly(10 * AT_ONCE_BYTES)
        assert not over.is_set()
        writer.close()
        await asyncio.wait_for(over.wait(), PATIENCE_S)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_many_tokens_become_text_off_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders: list[bool] = []
    decode = TextModel.decode

    def seen(self: TextModel, *given: Any, **how: Any) -> str:
        decoders.append(current_thread() is main_thread())
        return decode(self, *given, **how)

    monkeypatch.setattr(TextModel, "decode", seen)
    for count in (10, INLINE_CHARS + 1):
        assert (await http.post("/detokenize", json={"tokens": [5] * count})).is_success
    assert decoders == [True, False]


@pytest.mark.parametrize("count", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
def test_parts_make_the_answer_they_stand_for(count: int) -> None:
    ids = list(range(count))
    names = ['"é\n\u2028'] * count

    def same(parts: Any, answer: BaseModel) -> None:
        assert json.loads(b"".join(parts)) == json.loads(answer.model_dump_json())

    blank = Tokenized(count=count, max_model_len=7, tokens=[])
    same(filled(blank, tokens=items_of(ids)), blank.model_copy(update={"tokens": ids}))
    both = blank.model_copy(update={"token_strs": []})
    same(
        filled(both, tokens=items_of(ids), token_strs=items_of(ids, lambda some: names[: len(some)])),
        both.model_copy(update={"tokens": ids, "token_strs": names}),
    )
    text = 'a"é\\\n😀'[: max(1, count)] * count
    same(text_filled(Detokenized(prompt=""), text), Detokenized(prompt=text))
