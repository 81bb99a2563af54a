"""Texts on their way to decode instances: in shares, elsewhere when one is lost, no further than anyone waits."""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from components.discovery.book import InstanceBook
from components.errors import (
    DecodeLost,
    MalformedMessage,
    MeshError,
    NobodyListens,
    NoDecodeInstance,
    Overloaded,
    PromptTooLong,
)
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.messaging.fleet import Fleet
from components.messaging.inbox import StreamInbox
from components.messaging.liveness import Liveness
from components.wire.embed import MAX_TEXTS, CancelEmbed, EmbeddingModel, EmbedRequest, Vectors
from components.wire.tokens import unpack_tokens
from services.frontend.decode_choice import Waits
from services.frontend.embed_calls import MAX_CALL_TOKENS
from services.frontend.mesh_client import MeshClient
from services.frontend.ports import Texts
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.components.messaging.frames import nothing_lost
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


class Decode:
    """Answers with the number of tokens of each text; waits at its gate first."""

    def __init__(self, mesh: "Mesh", name: str, max_context: int = 20_000) -> None:
        self.mesh, self.name = mesh, name
        self.asked: list[EmbedRequest] = []
        self.refusals: list[MeshError] = []
        self.too_few = False
        self.gate = asyncio.Event()
        self.gate.set()
        mesh.bus.serve(f"ns.decode.{name}", [Endpoint("embed", EmbedRequest, self.embed)])
        embedding = EmbeddingModel(dimensions=1)
        mesh.book.put(name, record(name, "1", model="m", max_context=max_context, embedding=embedding))

    async def embed(self, request: EmbedRequest) -> Vectors:
        self.asked.append(request)
        await self.gate.wait()
        if self.refusals:
            raise self.refusals.pop()
        vectors = [b"%d" % len(unpack_tokens(text)) for text in request.texts]
        return Vectors(request_id=request.request_id, vectors=vectors[1:] if self.too_few else vectors)


class Mesh:
    def __init__(self) -> None:
        self.bus, self.book, self.inbox = FakeBus(), InstanceBook(), StreamInbox("ns.frontend.f.tokens", nothing_lost)
        fleet = Fleet(self.book, Liveness(self.book, "decode"), "decode", "round_robin", Random(0))
        self.client = MeshClient(self.bus, self.inbox, fleet, "m")

    async def embed(self, *lengths: int, life_ms: int = 60_000) -> list[int]:
        texts = Texts("r", "m", [[7] * length for length in lengths], now_ms() + life_ms, "salt", 3)
        async with asyncio.timeout(PATIENCE_S):
            return [int(vector) for vector in await self.client.embed(texts)]


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    made = Mesh()
    yield made
    for _ in range(3):
        await asyncio.sleep(0)
    assert not len(made.inbox), "a stream was left open"
    assert not made.client._sending


async def test_texts_go_in_shares_to_all_instances_and_come_back_in_order(mesh: Mesh) -> None:
    both = [Decode(mesh, "a"), Decode(mesh, "b")]
    assert mesh.client.models()[0].embedding == EmbeddingModel(dimensions=1)
    lengths = [1 + i % 5 for i in range(2 * MAX_TEXTS + 9)]
    assert await mesh.embed(*lengths) == lengths
    asked = [request for decode in both for request in decode.asked]
    assert sorted(len(request.texts) for request in asked) == [9, MAX_TEXTS, MAX_TEXTS]
    assert all(decode.asked for decode in both)
    assert len({request.request_id for request in asked}) == 3
    assert {(r.epoch, r.model, r.cache_salt, r.priority) for r in asked} == {("1", "m", "salt", 3)}
    long = [MAX_CALL_TOKENS + 1, MAX_CALL_TOKENS // 2, MAX_CALL_TOKENS // 2, 1]
    assert await mesh.embed(*long) == long
    assert [len(request.texts) for request in (both[0].asked + both[1].asked)[-3:]].count(2) <= 1
    assert not mesh.bus.of(CancelEmbed)


async def test_texts_go_to_instances_that_are_large_enough_for_the_longest(mesh: Mesh) -> None:
    small, large = Decode(mesh, "a", max_context=100), Decode(mesh, "b")
    for _ in range(3):
        assert await mesh.embed(60, 60, 101) == [60, 60, 101]
        assert await mesh.embed(100, 100) == [100, 100]
    assert small.asked
    assert all(max(map(len, request.texts)) <= 4 * 100 for request in small.asked)
    assert any(max(map(len, request.texts)) == 4 * 101 for request in large.asked)


async def test_each_call_has_an_id_of_its_own(mesh: Mesh) -> None:
    """A call whose answer NATS had lost was sent again with its id, which was in use: its client got that as an error."""
    decode = Decode(mesh, "a")
    decode.refusals += [NobodyListens("NATS restarts"), NobodyListens("NATS restarts")]
    assert await mesh.embed(3) == [3]
    assert len({request.request_id for request in decode.asked}) == 3


@pytest.mark.parametrize("how", ["refused", "lost"])
async def test_texts_of_an_instance_that_cannot_go_elsewhere(mesh: Mesh, how: str) -> None:
    first = Decode(mesh, "a")
    if how == "refused":
        first.refusals.append(Overloaded("leaving"))
    else:
        first.gate.clear()
    asking = asyncio.create_task(mesh.embed(3, 4))
    while not first.asked:
        await asyncio.sleep(0)
    second = Decode(mesh, "b")
    if how == "lost":
        mesh.book.remove("a")
    assert await asking == [3, 4]
    assert len(second.asked) == 1
    assert second.asked[0].request_id != first.asked[0].request_id
    first.gate.set()


async def test_an_invalid_text_is_refused_at_once(mesh: Mesh) -> None:
    decode = Decode(mesh, "a")
    decode.refusals.append(PromptTooLong("101 of 100"))
    with pytest.raises(PromptTooLong):
        await mesh.embed(101)
    decode.too_few = True
    with pytest.raises(MalformedMessage):
        await mesh.embed(1, 2)
    mesh.book.remove("a")
    mesh.client.choice._waits = Waits(0.1, 1000.0)
    with pytest.raises(NoDecodeInstance):
        await mesh.embed(1)


async def test_a_client_that_leaves_cancels_its_work(mesh: Mesh) -> None:
    decode = Decode(mesh, "a")
    decode.gate.clear()
    asking = asyncio.create_task(mesh.embed(*[1] * (MAX_TEXTS + 1)))
    while len(decode.asked) < 2:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for _ in range(5):
        await asyncio.sleep(0)
    assert {message.request_id for message in mesh.bus.of(CancelEmbed)} == {r.request_id for r in decode.asked}
    decode.gate.set()


async def test_an_instance_that_is_lost_again_and_again_is_given_up(mesh: Mesh) -> None:
    decode = Decode(mesh, "a")
    decode.refusals += [DecodeLost("gone")] * 20
    with pytest.raises(DecodeLost):
        await mesh.embed(1)
