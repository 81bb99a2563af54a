"""Embeddings on a decode instance, with an engine that the test controls."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from components.discovery.registry import Registration
from components.errors import (
    Cancelled,
    DeadlineExceeded,
    InvariantBroken,
    MeshError,
    Overloaded,
    PeerLost,
    PromptTooLong,
    Rejected,
    StaleInstance,
    UnknownModel,
)
from components.messaging.clocks import now_ms
from components.wire.embed import MAX_TEXTS, CancelEmbed, EmbedRequest, Vectors
from components.wire.tokens import pack_tokens
from engine.ports import Embedded, Failed, Phase
from services.decode.embedding import EmbeddingService
from tests.services.decode.fake_engine import FakeEngineLoop
from tests.waiting import turns

pytestmark = pytest.mark.anyio


class Instance:
    def __init__(self) -> None:
        self.engine = FakeEngineLoop()
        self.is_draining = False
        registration = Registration("d", "mine")
        self.service = EmbeddingService(registration, self.engine, "m", lambda: self.is_draining)

    def ask(self, life_ms: int = 60_000, **changes: Any) -> asyncio.Task[Vectors]:
        request = EmbedRequest(
            request_id="r",
            epoch="mine",
            model="m",
            texts=[pack_tokens([1, 2]), pack_tokens([3])],
            deadline_unix_ms=now_ms() + life_ms,
            cache_salt="s",
            priority=4,
        )
        return asyncio.create_task(self.service.embed(replace(request, **changes)))

    def done(self, *ids: str) -> None:
        self.engine.step(embedded=[Embedded(name, name.encode(), 0) for name in ids])

    def assert_nothing_is_kept(self) -> None:
        assert not len(self.service)
        assert not self.service._calls
        assert self.service._idle.is_set()


@pytest.fixture
async def instance() -> Instance:
    return Instance()


async def test_vectors_come_in_the_order_of_the_texts(instance: Instance) -> None:
    asking = instance.ask()
    await turns()
    assert len(instance.service) == 2
    submitted = instance.engine.engine.submitted
    assert {name: list(r.token_ids) for name, r in submitted.items()} == {"r.0": [1, 2], "r.1": [3]}
    assert {(r.phase, r.cache_salt, r.priority) for r in submitted.values()} == {(Phase.EMBED, "s", 4)}
    instance.done("r.1", "somebody else's")
    await turns()
    assert not asking.done()
    instance.done("r.0")
    assert (await asking).vectors == [b"r.0", b"r.1"]
    assert not instance.engine.did("cancel")
    instance.assert_nothing_is_kept()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epoch": "old"}, StaleInstance),
        ({"model": "other"}, UnknownModel),
        ({"deadline_unix_ms": 1}, DeadlineExceeded),
        ({"texts": [b"\0\0\0\0"] * (MAX_TEXTS + 1)}, Rejected),
        ({"texts": [b"\0"]}, MeshError),
    ],
)
async def test_what_is_wrong_is_refused_before_the_engine_hears_of_it(
    instance: Instance, changes: dict[str, Any], error: type[MeshError]
) -> None:
    with pytest.raises(error):
        await instance.ask(**changes)
    assert not instance.engine.engine.submitted
    instance.assert_nothing_is_kept()


async def test_a_text_that_the_engine_refuses_or_fails_at_ends_the_call_and_the_other_texts(instance: Instance) -> None:
    instance.engine.engine.refusal = PromptTooLong("3 of 2")
    with pytest.raises(PromptTooLong):
        await instance.ask()
    instance.engine.engine.refusal = None
    asking = instance.ask()
    await turns()
    instance.engine.step(failed=[Failed("r.0", InvariantBroken("boom"))])
    with pytest.raises(InvariantBroken):
        await asking
    await turns()
    assert "r.1" in instance.engine.did("cancel")
    instance.assert_nothing_is_kept()


async def test_the_deadline_and_whoever_leaves_end_the_work(instance: Instance) -> None:
    with pytest.raises(DeadlineExceeded):
        await instance.ask(life_ms=300)
    await turns()
    assert instance.engine.did("cancel") == ["r.0", "r.1"]
    asking = instance.ask(request_id="s")
    await turns()
    with pytest.raises(Rejected, match="in use"):
        await instance.ask(request_id="s")
    assert (await instance.service.cancel_embed(CancelEmbed(request_id="s"))).count == 2
    assert (await instance.service.cancel_embed(CancelEmbed(request_id="unknown"))).count == 0
    with pytest.raises(Cancelled):
        await asking
    await turns()
    assert instance.engine.did("cancel")[2:] == ["s.0", "s.1"]
    instance.assert_nothing_is_kept()


async def test_an_instance_that_leaves_answers_what_it_has_and_gives_the_rest_back(instance: Instance) -> None:
    first, second = instance.ask(request_id="a"), instance.ask(request_id="b")
    await turns()
    instance.is_draining = True
    with pytest.raises(Overloaded):
        await instance.ask()
    draining = asyncio.create_task(instance.service.drained())
    instance.done("a.0", "a.1")
    assert (await first).vectors == [b"a.0", b"a.1"]
    assert not draining.done()
    instance.service.stop_all("leaving")
    with pytest.raises(PeerLost):
        await second
    await draining
    instance.assert_nothing_is_kept()
