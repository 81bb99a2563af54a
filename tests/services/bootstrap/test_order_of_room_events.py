"""Events of a room, in every order and a few turns of the event loop apart: it ends once, with one report to decode."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import permutations
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry

from components.discovery.registry import Registration
from components.errors import MalformedMessage, MeshError, Overloaded, TransferFailed
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.wire.prefill import CloseRooms, OpenRoom, PagesOffered, RoomFailed, RoomOk
from services.bootstrap.service import BootstrapService
from tests.components.messaging.fake_bus import FakeBus
from tests.faults.virtual_loop import run_virtually

LIFE_S: Final = 30
CLEAN_S: Final = 1.0
TURNS: Final = (0, 1, 2, 8)  # between two events; an answer is read within the most


class Scene:
    """A bootstrap replica between a decode and a prefill that the test plays."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.bus.serve("ns.prefill.p", [Endpoint("pages", PagesOffered, self.take)])
        self.offers: list[asyncio.Future[RoomOk]] = []  # unanswered
        self.opened = self.closed = self.forgotten = self.refused = 0  # rooms
        self.ended = {"closed": 0, "expired": 0, "failed": 0}  # by processes that have ended
        self.start()

    def start(self) -> None:
        self.metrics = CollectorRegistry()
        self.service = BootstrapService(self.bus, "ns", Registration("boot"), self.metrics)
        self.cleaning = asyncio.ensure_future(self.service.clean(CLEAN_S))

    async def stop(self) -> None:
        running = [self.cleaning, *self.service._forwarding]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.ended = {how: self.count(how) for how in self.ended}
        self.forgotten += len(self.service)

    def count(self, how: str) -> int:
        now = self.metrics.get_sample_value("kvmesh_rooms_ended_total", {"how": how})
        return self.ended[how] + int(now or 0)

    async def take(self, offered: PagesOffered) -> RoomOk:
        assert (offered.room, offered.decode_id) == ("one", "d")
        self.offers.append(asyncio.get_running_loop().create_future())
        return await self.offers[-1]

    def answer(self, error: MeshError | None) -> None:
        offer = next((offer for offer in self.offers if not offer.done()), None)
        if offer is None:
            return
        if error is None:
            offer.set_result(RoomOk(room="one"))
        else:
            offer.set_exception(error)
            self.refused += len(self.service)


async def _opened(scene: Scene) -> None:
    request: dict[str, Any] = {"prefill_id": "p", "prefill_epoch": "1", "decode_id": "d", "decode_epoch": "1"}
    deadline = now_ms() + LIFE_S * 1000
    opening = OpenRoom(
        room="one",
        request_id="r",
        pages=[1],
        num_cached_pages=0,
        aux_slot=0,
        deadline_unix_ms=deadline,
        **request,
    )
    with suppress(MalformedMessage, Overloaded):  # open already; it drains
        await scene.service.open(opening)
        scene.opened += 1


async def _taken(scene: Scene) -> None:
    scene.answer(None)


async def _refused(scene: Scene) -> None:
    scene.answer(TransferFailed("over"))


async def _closed(scene: Scene) -> None:
    scene.closed += (await scene.service.close(CloseRooms(rooms=["one", "another"]))).count


async def _late(_: Scene) -> None:
    loop: Any = asyncio.get_running_loop()
    loop._leaping.now_s += LIFE_S


async def _restarted(scene: Scene) -> None:
    await scene.stop()
    scene.start()


async def _drains(scene: Scene) -> None:
    scene.service.draining = True


EVENTS: Final[dict[str, Callable[[Scene], Awaitable[None]]]] = {
    "opened again": _opened,
    "taken": _taken,
    "refused": _refused,
    "refused again": _refused,
    "closed": _closed,
    "closed again": _closed,
    "late": _late,
    "restarted": _restarted,
    "drains": _drains,
}


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _run(order: tuple[str, ...], pause: int) -> None:
    scene = Scene()
    await _opened(scene)
    for name in order:
        await _turns(pause)
        await EVENTS[name](scene)
    await _turns(pause)
    if pause == TURNS[-1]:
        assert len(scene.bus.of(RoomFailed)) == scene.refused, "decode hears at once"
    await asyncio.sleep(LIFE_S + 2 * CLEAN_S)
    told = scene.bus.of(RoomFailed)
    assert all(failed.room == "one" for failed in told)
    assert len(told) == scene.count("failed")
    assert scene.closed == scene.count("closed")
    assert len(told) + scene.closed + scene.count("expired") + scene.forgotten == scene.opened
    assert not len(scene.service)
    assert not scene.service._forwarding
    await scene.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("first", EVENTS)
def test_a_room_ends_once_and_decode_hears_of_its_failure_once(first: str) -> None:
    async def all_orders() -> None:
        for following in permutations([name for name in EVENTS if name != first], 2):
            for pause in TURNS:
                try:
                    await _run((first, *following), pause)
                except BaseException as exc:
                    exc.add_note(f"{(first, *following)}, {pause} turns apart")
                    raise

    run_virtually(all_orders)
