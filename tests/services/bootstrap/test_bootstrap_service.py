import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from components.aio import background
from components.discovery.registry import Registration
from components.errors import MalformedMessage, MeshError, Overloaded, TransferFailed
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.wire.prefill import CloseRooms, OpenRoom, PagesOffered, RoomFailed, RoomOk, RoomsClosed
from services.bootstrap.service import BootstrapService
from tests.components.messaging.fake_bus import FakeBus
from tests.waiting import turns, until

pytestmark = pytest.mark.anyio


class Replica:
    def __init__(self) -> None:
        self.bus, self.metrics = FakeBus(), CollectorRegistry()
        self.service = BootstrapService(self.bus, "ns", Registration("boot"), self.metrics)
        self.refusal: MeshError | None = None
        self.bus.serve("ns.prefill.p", [Endpoint("pages", PagesOffered, self.take)])

    async def take(self, offered: PagesOffered) -> RoomOk:
        """Receive decode's pages, as prefill."""
        if self.refusal is not None:
            raise self.refusal
        return RoomOk(room=offered.room)

    async def open(self, room: str = "one", life_ms: int = 60_000) -> RoomOk:
        return await self.service.open(
            OpenRoom(
                room=room,
                request_id="r",
                prefill_id="p",
                prefill_epoch="1",
                decode_id="d",
                decode_epoch="1",
                pages=[1],
                num_cached_pages=0,
                aux_slot=0,
                deadline_unix_ms=now_ms() + life_ms,
            )
        )

    @property
    def open_rooms(self) -> float | None:
        return self.metrics.get_sample_value("kvmesh_open_rooms")

    def failures(self) -> list[tuple[str, str]]:
        return [(subject, m.error) for subject, m in self.bus.sent if isinstance(m, RoomFailed)]


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(background(made.service.clean(0.01), "clean"))
        yield made


async def test_pages_are_handed_on_and_a_room_lasts_until_it_is_closed(replica: Replica) -> None:
    assert await replica.open("one") == RoomOk(room="one")
    await replica.open("two")
    await turns()
    [(subject, offered), _] = [each for each in replica.bus.sent if isinstance(each[1], PagesOffered)]
    assert (subject, offered.room, offered.bootstrap_id) == ("ns.prefill.p.pages", "one", "boot")
    assert replica.open_rooms == 2
    assert await replica.service.close(CloseRooms(rooms=["one", "two", "three"])) == RoomsClosed(count=2)
    assert replica.open_rooms == 0
    assert not replica.failures()


async def test_a_replica_that_drains_opens_no_room_and_keeps_those_it_has(replica: Replica) -> None:
    await replica.open("one")
    replica.service.draining = True
    with pytest.raises(Overloaded, match="this bootstrap replica is draining"):
        await replica.open("two")
    assert replica.open_rooms == 1
    assert await replica.service.close(CloseRooms(rooms=["one"])) == RoomsClosed(count=1)
    replica.service.draining = False
    assert await replica.open("two") == RoomOk(room="two")


async def test_the_offer_is_forwarded_as_decode_made_it(replica: Replica) -> None:
    await replica.open(life_ms=5000)
    await turns()
    [offered] = replica.bus.of(PagesOffered)
    assert offered == PagesOffered(
        request_id="r",
        room="one",
        bootstrap_id="boot",
        decode_id="d",
        decode_epoch="1",
        pages=[1],
        num_cached_pages=0,
        aux_slot=0,
        deadline_unix_ms=offered.deadline_unix_ms,
        sender="boot",
        sent_unix_ms=offered.sent_unix_ms,
    )
    assert 0 <= offered.deadline_unix_ms - offered.sent_unix_ms <= 5000


async def test_a_room_that_is_open_is_not_opened_again(replica: Replica) -> None:
    await replica.open()
    with pytest.raises(MalformedMessage, match="room one is open already"):
        await replica.open()
    assert replica.open_rooms == 1


async def test_a_room_is_closed_once_and_closing_it_again_is_fine(replica: Replica) -> None:
    await replica.open()
    closing = CloseRooms(rooms=["one", "another"])
    assert [(await replica.service.close(closing)).count for _ in range(2)] == [1, 0]
    assert replica.open_rooms == 0


async def test_prefill_that_refuses_after_it_has_closed_the_room_is_not_reported_again(replica: Replica) -> None:
    replica.refusal = TransferFailed("over")
    await replica.open()
    await replica.service.close(CloseRooms(rooms=["one"]))
    await turns()
    assert not replica.failures()


@pytest.mark.parametrize("refusal", [TransferFailed("over"), MalformedMessage("garbled"), None])
async def test_decode_is_told_at_once_when_prefill_does_not_take_its_pages(
    replica: Replica, refusal: MeshError | None
) -> None:
    """The offer was published without an answer, so a lost message cost a transfer's time limit."""
    replica.refusal = refusal
    if refusal is None:
        replica.bus.handlers.clear()  # no listener
    await replica.open()
    await turns()
    error = "NobodyListens" if refusal is None else type(refusal).__name__
    assert replica.failures() == [("ns.decode.d.room_failed", error)]
    assert replica.open_rooms == 0


async def test_a_room_that_no_prefill_closes_is_forgotten_at_its_deadline_which_both_sides_watch(
    replica: Replica,
) -> None:
    await replica.open(life_ms=30)
    await until(lambda: not replica.open_rooms)
    assert not replica.failures()


async def test_a_replica_that_leaves_forwards_the_offers_that_it_has(replica: Replica) -> None:
    gate = asyncio.Event()

    async def take(offered: PagesOffered) -> RoomOk:
        await gate.wait()
        return RoomOk(room=offered.room)

    replica.bus.serve("ns.prefill.p", [Endpoint("pages", PagesOffered, take)])
    await replica.open("one")
    leaving = asyncio.create_task(replica.service.leave())
    await turns()
    assert not leaving.done()
    with pytest.raises(Overloaded, match="draining"):
        await replica.open("two")
    gate.set()
    await leaving
    assert replica.failures() == []
