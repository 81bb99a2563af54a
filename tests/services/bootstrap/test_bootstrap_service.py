import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from components.aio import background
from components.discovery.registry import Registration
from components.errors import IncompatibleLayout, MalformedMessage, MeshError, TransferFailed
from components.kv_transfer.layout import KvLayout
from components.messaging.deadline import now_ms
from components.messaging.service import Endpoint
from components.wire.rooms import CloseRooms, OpenRoom, PagesOffered, RoomFailed, RoomOk, RoomsClosed
from services.bootstrap.handlers import BootstrapService
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import LAYOUT, endpoint
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
        self.refusal: MeshError | None = None
        self.bus.serve("ns.prefill.p", [Endpoint("pages", PagesOffered, self.take)])

    async def take(self, offered: PagesOffered) -> RoomOk:
        """Prefill gets decode's pages."""
        if self.refusal is not None:
            raise self.refusal
        return RoomOk(room=offered.room)

    async def open(self, room: str = "one", life_ms: int = 60_000, layout: KvLayout | None = None) -> RoomOk:
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
                layout=layout,
            )
        )

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


async def test_pages_that_do_not_fit_prefills_as_etcd_has_them_are_refused(replica: Replica) -> None:
    replica.registry.book.put("p", record("p", "1", role="prefill", kv=endpoint("prefill-p")))
    with pytest.raises(IncompatibleLayout, match="page_size: 4 here, 6 there"):
        await replica.open(layout=replace(LAYOUT, page_size=6))
    assert replica.open_rooms == 0
    assert not replica.bus.sent
    await replica.open(layout=LAYOUT)
    assert replica.open_rooms == 1


@pytest.mark.parametrize("refusal", [TransferFailed("over"), MalformedMessage("garbled"), None])
async def test_decode_is_told_at_once_when_prefill_does_not_take_its_pages(
    replica: Replica, refusal: MeshError | None
) -> None:
    """The pages were published, and nobody looked whether they arrived: a lost message cost a transfer's whole time."""
    replica.refusal = refusal
    if refusal is None:
        replica.bus.handlers.clear()  # nobody listens
    await replica.open()
    await turns()
    error = "NobodyListens" if refusal is None else type(refusal).__name__
    assert replica.failures() == [("ns.decode.d.room_failed", error)]
    assert replica.open_rooms == 0


async def test_a_transfer_that_nobody_ends_fails_at_its_deadline(replica: Replica) -> None:
    await replica.open(life_ms=30)
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
    await replica.open("two")
    replica.registry.book.remove("d")
    await turns()
    assert replica.failures()[1:] == [("ns.prefill.p.room_failed", "PeerLost")]
