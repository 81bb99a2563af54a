"""A decode instance of a large fleet over a real NATS: it receives what its share of the prefill instances publish."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from components.discovery.book import InstanceBook
from components.messaging import fan_out
from components.messaging.bus import Bus, connect_bus
from components.messaging.fan_out import Following
from components.messaging.fleet import Fleet, watch_fleet
from components.messaging.kv_publisher import KvEventPublisher, publish_kv_events
from components.messaging.service import serve_calls
from components.wire.heartbeat import Heartbeat
from tests.components.discovery.records import record

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

NAMES = [f"p{number}" for number in range(8)]


class Scene:
    """Eight prefill instances, and a decode instance that follows three of them."""

    def __init__(self, bus: Bus, namespace: str, book: InstanceBook, following: Following, fleet: Fleet) -> None:
        self.bus, self.namespace, self.book, self.following, self.fleet = bus, namespace, book, following, fleet
        self.publishers: dict[str, KvEventPublisher] = {}

    @property
    def chosen(self) -> set[str]:
        return {one.instance_id for one in self.following.chosen.of_role("prefill")}

    async def beat(self) -> None:
        """All eight publish a heartbeat."""
        for name in NAMES:
            beat = Heartbeat(instance_id=name, epoch="e1", step=1, busy=False)
            await self.bus.publish(f"{self.namespace}.prefill.{name}.heartbeat", beat)

    def heard(self) -> set[str]:
        return {name for name in NAMES if self.fleet.alive.last_heartbeat(name) is not None}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def scene(nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(fan_out, "ALL_PAIRS", 1)
    monkeypatch.setattr(fan_out, "FOLLOWED", 3)
    book = InstanceBook()
    for name in NAMES:
        subject = f"{namespace}.prefill.{name}"
        book.put(name, record(name, role="prefill", model="m", subject=subject, kv_events=True))
    for number in range(8):
        book.put(f"d{number}", record(f"d{number}", model="m"))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers, bus = await enter(connect_bus(nats_url, "workers")), await enter(connect_bus(nats_url, "decode"))
        publishers = {}
        for name in NAMES:
            subject = f"{namespace}.prefill.{name}"
            publishers[name] = await enter(publish_kv_events(workers, subject, name, lambda: "e1"))
            await enter(serve_calls(workers, "prefill", subject, publishers[name].endpoints(), {}))
        following = Following(book, "d0", "m")
        fleet = await enter(watch_fleet(bus, namespace, "prefill", book, "kv_aware", following=following))
        made = Scene(workers, namespace, book, following, fleet)
        made.publishers = publishers
        yield made


async def test_only_those_that_are_followed_are_received_and_chosen(scene: Scene) -> None:
    assert len(scene.chosen) == 3
    for name, publisher in scene.publishers.items():
        publisher.take([(name.encode().ljust(16), True)])
    await scene.beat()
    index = scene.fleet.index
    assert index is not None
    await until(lambda: scene.heard() == scene.chosen and all(index.blocks_of(name) for name in scene.chosen))
    assert not any(index.blocks_of(name) for name in set(NAMES) - scene.chosen)
    assert {record.instance_id for record in scene.fleet.alive.usable("m")} == scene.chosen
    assert {member.instance_id for member in scene.fleet.router.book.members} == scene.chosen


async def test_who_replaces_a_lost_instance_is_received_from_then_on(scene: Scene) -> None:
    before = scene.chosen
    lost: list[str] = []
    scene.fleet.alive.on_lost(lambda record, _why: lost.append(record.instance_id))
    scene.book.remove(min(before))
    assert lost == [min(before)]
    (added,) = scene.chosen - before
    scene.publishers[added].take([(b"block".ljust(16), True)])
    index = scene.fleet.index
    assert index is not None

    async def beat() -> None:
        while True:
            await scene.beat()
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    await until(lambda: added in scene.heard() and bool(index.blocks_of(added)))
    beating.cancel()
    assert {member.instance_id for member in scene.fleet.router.book.members} == scene.chosen


async def test_an_instance_that_is_dropped_from_the_share_is_no_loss(scene: Scene) -> None:
    """Its transfers go on: only new prompts go elsewhere."""
    before = scene.chosen
    lost: list[str] = []
    scene.fleet.alive.on_lost(lambda record, _why: lost.append(record.instance_id))
    number = 0
    while before <= scene.chosen:
        scene.book.put(f"q{number}", record(f"q{number}", role="prefill", model="m", subject=f"x.prefill.q{number}"))
        number += 1
    (dropped,) = before - scene.chosen
    assert lost == []
    assert not scene.fleet.alive.is_lost(dropped)
    assert scene.fleet.router.book.find(dropped) is None


async def test_a_fleet_that_becomes_small_is_followed_whole(scene: Scene) -> None:
    for number in range(3, 8):
        scene.book.remove(f"p{number}")

    async def beat() -> None:
        while scene.heard() != {"p0", "p1", "p2"}:
            await scene.beat()
            await asyncio.sleep(0.05)

    async with asyncio.timeout(15):
        await beat()
    assert not scene.following.is_partial
