import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from components.aio import background
from components.discovery.registry import Registration
from components.errors import DeadlineExceeded, PrefillLost, TransferFailed
from components.messaging.deadline import now_ms
from components.messaging.service import Endpoint
from components.wire.rooms import CloseRoom, OfferPages, OpenRoom, PagesOffered, RoomFailed, RoomOk
from services.bootstrap.handlers import BootstrapService
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.services.decode.fake_engine import FakeRegistry, turns

pytestmark = pytest.mark.anyio


class Replica:
    def __init__(self) -> None:
        self.bus, self.registry, self.metrics = FakeBus(), FakeRegistry(), CollectorRegistry()
        for role, name in (("prefill", "p"), ("decode", "d")):
            self.registry.book.put(name, record(name, "1", role=role))
        service = BootstrapService(
            self.bus,
            "ns",
            Registration("boot"),
            self.registry,
            self.metrics,
        )
        self.service = service

    async def open(self, life_ms: int = 60_000) -> str:
        opened = await self.service.open(
            OpenRoom(
                request_id="r",
                prefill_id="p",
                prefill_epoch="1",
                decode_id="d",
                decode_epoch="1",
                deadline_unix_ms=now_ms() + life_ms,
            )
        )
        return opened.room

    async def offer(self, room: str) -> RoomOk:
        return await self.service.offer(
            OfferPages(room=room, decode_id="d", decode_epoch="1", pages=[1], num_cached_pages=0, aux_slot=0)
        )

    def prefill(self, handler: Any) -> None:
        self.bus.serve("ns.prefill.p", [Endpoint("pages", PagesOffered, handler)])

    @property
    def open_rooms(self) -> float | None:
        return self.metrics.get_sample_value("open_rooms")

    def failures(self) -> list[tuple[str, str]]:
        return [(subject, m.error) for subject, m in self.bus.sent if isinstance(m, RoomFailed)]


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(background(made.service.tell(), "tell"))
        await stack.enter_async_context(background(made.service.clean(0.01), "clean"))
        yield made


async def taken(offer: PagesOffered) -> RoomOk:
    return RoomOk(room=offer.room)


async def test_an_offer_is_answered_when_prefill_has_it(replica: Replica) -> None:
    replica.prefill(taken)
    room = await replica.open()
    assert replica.open_rooms == 1
    assert await replica.offer(room) == RoomOk(room=room)
    await replica.service.close(CloseRoom(room=room))
    assert replica.open_rooms == 0
    assert not replica.failures()


async def test_an_offer_that_prefill_cannot_take_fails_the_room_and_says_so_to_decode(replica: Replica) -> None:
    with pytest.raises(PrefillLost, match="did not take the pages: nobody listens"):
        await replica.offer(await replica.open())
    assert replica.failures() == [("ns.decode.d.room_failed", "PrefillLost")]
    assert replica.open_rooms == 0


async def test_an_offer_that_prefill_refuses_fails_the_room(replica: Replica) -> None:
    async def over(_: PagesOffered) -> RoomOk:
        raise TransferFailed("over here")

    replica.prefill(over)
    with pytest.raises(PrefillLost, match="over here"):
        await replica.offer(await replica.open())
    assert replica.open_rooms == 0


async def test_a_prefill_that_does_not_answer_leaves_the_room_to_its_deadline(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bootstrap.handlers.DELIVER_TIMEOUT_S", 0.01)

    async def silent(_: PagesOffered) -> RoomOk:
        await asyncio.Event().wait()
        raise AssertionError

    replica.prefill(silent)
    room = await replica.open(life_ms=300)
    with pytest.raises(DeadlineExceeded):
        await replica.offer(room)
    async with asyncio.timeout(5):
        while replica.open_rooms:
            await asyncio.sleep(0.005)
    assert sorted(replica.failures()) == [
        ("ns.decode.d.room_failed", "DeadlineExceeded"),
        ("ns.prefill.p.room_failed", "DeadlineExceeded"),
    ]


async def test_a_side_that_leaves_etcd_or_comes_back_anew_is_told_to_the_other(replica: Replica) -> None:
    await replica.open()
    replica.registry.book.put("p", record("p", "2", role="prefill"))
    await turns()
    assert replica.failures() == [("ns.decode.d.room_failed", "PrefillLost")]
    await replica.open()
    replica.registry.book.remove("d")
    await turns()
    assert replica.failures()[1:] == [("ns.prefill.p.room_failed", "PeerLost")]
