"""Events of a worker and its KV events, in every order: in the end the mirror equals its cache."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count, permutations
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import pytest
from msgspec import Struct

from components.aio import background
from components.discovery.book import InstanceBook
from components.errors import DeadlineExceeded
from components.messaging import kv_publisher, kv_subscriber
from components.messaging.kv_publisher import KvEventPublisher
from components.messaging.kv_subscriber import KvMirror
from components.routing.kv_index import KvIndex
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.faults.virtual_loop import run_virtually

LATENCY_S: Final = 0.004
PAUSES_S: Final = (None, 0.002, 0.07)  # between events: none, less than a message takes, more than between two batches
SLOW_S: Final = 0.04  # an answer that arrives after those of later calls
QUIET_S: Final = 20.0  # at most, until they agree
MAX_BLOCKS: Final = 64


class Nats(FakeBus):
    """Delays messages, and loses some."""

    def __init__(self) -> None:
        super().__init__()
        self.client: Any = SimpleNamespace(stats={"reconnects": 0})
        self.receive: Callable[[Any], Any] | None = None
        self.loses_batch = self.loses_answer = self.is_slow = False
        self._under_way: set[asyncio.Task[None]] = set()

    async def publish_bytes(self, subject: str, data: bytes, reply: str = "") -> None:
        if self.loses_batch:
            self.loses_batch = False
            return
        task = asyncio.create_task(self._deliver(data))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def call(self, subject: str, request: Struct, *replies: type[Any], timeout_s: float) -> Any:
        await asyncio.sleep(LATENCY_S)
        answer = await super().call(subject, request, *replies, timeout_s=timeout_s)
        slow, self.is_slow = self.is_slow, False
        await asyncio.sleep(SLOW_S if slow else LATENCY_S)
        if self.loses_answer:
            self.loses_answer = False
            raise DeadlineExceeded("no answer in time")
        return answer

    def reconnect(self) -> None:
        """Lose all messages on their way."""
        for task in self._under_way:
            task.cancel()
        self.client.stats["reconnects"] += 1

    async def _deliver(self, data: bytes) -> None:
        await asyncio.sleep(LATENCY_S)
        assert self.receive is not None
        await self.receive(SimpleNamespace(data=data))


class Scene:
    """One worker and one router."""

    def __init__(self, fresh: Iterator[bytes], *, crowded: bool) -> None:
        """`crowded`: another instance fills most of the router's index."""
        self.bus = Nats()
        self.book = InstanceBook()
        self.index = KvIndex(MAX_BLOCKS)
        self.mirror = KvMirror(self.bus, "prefill", self.book, self.index, Random(1))
        self.bus.receive = self.mirror.receive
        self.fresh = fresh
        self.epochs = count(1)
        self.epoch = ""
        self.blocks: list[bytes] = []
        self.is_there = True
        self._stack = AsyncExitStack()
        if crowded:
            self.index.add("other", [b"\0" + next(fresh)[:15] for _ in range(MAX_BLOCKS - 4)])

    async def __aenter__(self) -> "Scene":
        await self._stack.enter_async_context(background(self.mirror.run(), "dumps"))
        await self._stack.enter_async_context(background(self.mirror.check(), "check"))
        await self._start()
        self.stored()
        self.registered()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        await self._stack.aclose()

    async def _start(self) -> None:
        publisher = KvEventPublisher(self.bus, "w", "w", lambda: self.epoch)
        self.publisher = publisher
        self.bus.serve("w", publisher.endpoints())
        self._publishing = asyncio.create_task(publisher.run())

    async def _stop(self) -> None:
        self._publishing.cancel()
        await asyncio.wait({self._publishing})

    def stored(self) -> None:
        new = [next(self.fresh) for _ in range(3)]
        self.blocks += new
        self.publisher.record((block, True) for block in new)

    def evicted(self) -> None:
        """Evict parents first."""
        gone, self.blocks = self.blocks[:2], self.blocks[2:]
        self.publisher.record((block, False) for block in gone)

    def registered(self) -> None:
        """Register the same process again, as after an outage of etcd."""
        self.epoch = str(next(self.epochs))
        self.book.put("w", record("w", self.epoch, role="prefill", subject="w", kv_events=True))
        self.is_there = True

    async def restarted(self) -> None:
        """Start a new process under the same id, which replaces the record."""
        await self._stop()
        self.blocks, self.epoch = [], ""
        await self._start()
        self.stored()
        self.registered()

    def left(self) -> None:
        self.book.remove("w")
        self.epoch, self.is_there = "", False
        assert not self.index.blocks_of("w"), "at once"

    def lost_batch(self) -> None:
        self.bus.loses_batch = True
        self.stored()

    def lost_answer(self) -> None:
        self.bus.loses_answer = True

    def slow_answer(self) -> None:
        self.bus.is_slow = True

    def reconnected(self) -> None:
        self.bus.reconnect()

    def agrees(self) -> bool:
        if not self.is_there:
            return not self.index.blocks_of("w") and "w" not in self.index
        return self.mirror.is_current("w") and self.index.blocks_of("w") == set(self.blocks)


EVENTS: Final[list[Callable[[Scene], Any]]] = [
    Scene.stored,
    Scene.evicted,
    Scene.registered,
    Scene.restarted,
    Scene.left,
    Scene.lost_batch,
    Scene.lost_answer,
    Scene.slow_answer,
    Scene.reconnected,
]


async def run(events: tuple[Callable[[Scene], Any], ...], pause_s: float | None, fresh: Iterator[bytes]) -> None:
    async with Scene(fresh, crowded=pause_s == PAUSES_S[-1]) as scene:
        await asyncio.sleep(PAUSES_S[-1])
        for event in events:
            if (done := event(scene)) is not None:
                await done
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        scene.index.remove("other")
        try:
            async with asyncio.timeout(QUIET_S):
                while not scene.agrees():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(
                f"no agreement after {[event.__name__ for event in events]}, {pause_s} s apart"
            ) from None
        assert not scene.mirror.missing
        assert all(instance.task is None for instance in scene.mirror._instances.values())


def test_a_mirror_equals_the_cache_when_all_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "DUMP_PART_BLOCKS", 2)
    monkeypatch.setattr(kv_subscriber, "SLICE_BLOCKS", 1)

    async def main() -> None:
        fresh = (number.to_bytes(16, "little") for number in count())
        for events in permutations(EVENTS, 3):
            for pause_s in PAUSES_S:
                await run(events, pause_s, fresh)

    run_virtually(main)
