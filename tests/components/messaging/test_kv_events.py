"""A worker's cache and a router's mirror of it, over a real NATS, agree again after any event."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from components.discovery.book import InstanceBook
from components.errors import BackendUnavailable, Overloaded, Rejected, StaleInstance
from components.messaging import kv_publisher, kv_subscriber
from components.messaging.bus import Bus
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.messaging.fleet import show_kv_mirror
from components.messaging.kv_publisher import KvEventPublisher
from components.messaging.kv_subscriber import KvMirror, follow_kv_events
from components.routing.kv_index import MAX_BLOCKS, KvIndex
from components.wire.kv_events import DUMP_PART_BLOCKS, FetchKvDump, KvDumpPart, KvEventBatch, pack_batch, unpack_hashes
from services.local.servers import NATS, running
from tests.components.discovery.records import record
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

draw = random.Random(5)


def fresh(count: int) -> list[bytes]:
    return [draw.randbytes(16) for _ in range(count)]


@dataclass(slots=True)
class Worker:
    """A cache that the test fills, and its publisher."""

    namespace: str
    book: InstanceBook
    publisher: KvEventPublisher
    epoch: str = ""
    blocks: set[bytes] = field(default_factory=set)

    def store(self, blocks: list[bytes]) -> None:
        self.blocks.update(blocks)
        self.publisher.record((block, True) for block in blocks)

    def remove(self, blocks: list[bytes]) -> None:
        self.blocks.difference_update(blocks)
        self.publisher.record((block, False) for block in blocks)

    def register(self, epoch: str) -> None:
        self.epoch = epoch
        subject = f"{self.namespace}.prefill.w"
        self.book.put("w", record("w", epoch, role="prefill", subject=subject, kv_events=True))

    def leave(self) -> None:
        self.epoch = ""
        self.book.remove("w")


@asynccontextmanager
async def worker(url: str, namespace: str, book: InstanceBook) -> AsyncIterator[Worker]:
    subject = f"{namespace}.prefill.w"
    made: list[Worker] = []
    async with (
        connect_bus(url, "worker") as bus,
        KvEventPublisher(bus, subject, "w", lambda: made[0].epoch if made else "").running() as publisher,
        serve_calls(bus, "prefill", subject, publisher.endpoints(), {}),
    ):
        made.append(Worker(namespace, book, publisher))
        yield made[0]


@dataclass(slots=True)
class Scene:
    """One worker, one router."""

    worker: Worker
    router: Bus
    index: KvIndex
    mirror: KvMirror

    def agrees(self) -> bool:
        return self.mirror.is_current("w") and self.index.blocks_of("w") == self.worker.blocks

    async def until_it_agrees(self) -> None:
        await until(self.agrees)


@asynccontextmanager
async def scene(url: str, namespace: str, max_blocks: int = MAX_BLOCKS) -> AsyncIterator[Scene]:
    book, index = InstanceBook(), KvIndex(max_blocks)
    async with (
        worker(url, namespace, book) as one,
        connect_bus(url, "router") as router,
        follow_kv_events(router, namespace, "prefill", book, index) as mirror,
    ):
        yield Scene(one, router, index, mirror)


async def test_a_router_that_starts_late_gets_a_dump_in_parts_while_events_go_on(nats_url: str, namespace: str) -> None:
    """The dump has three parts, and some of its blocks are evicted while it is fetched."""
    async with scene(nats_url, namespace) as s:
        s.worker.store(fresh(2 * DUMP_PART_BLOCKS + 10))
        s.worker.register("1")
        for _ in range(40):
            s.worker.remove(draw.sample(sorted(s.worker.blocks), 20))
            s.worker.store(fresh(30))
            await asyncio.sleep(0.005)
        await s.until_it_agrees()
        assert s.mirror.counts.gaps == 0
        assert s.mirror.counts.dumps == 1
        assert not s.worker.publisher._dumps, "the last part was the end of it"


async def test_a_second_router_that_asks_takes_nothing_from_the_first(nats_url: str, namespace: str) -> None:
    """A dump has changes that are not yet in a batch. A router that has followed must still get them."""
    async with scene(nats_url, namespace) as s:
        s.worker.register("1")
        await s.until_it_agrees()
        s.worker.store(fresh(20))
        for _ in range(20):
            some = fresh(3)
            s.worker.store(some)
            part = await s.worker.publisher.dump(FetchKvDump(epoch="1"))
            assert set(unpack_hashes(part.blocks)) == s.worker.blocks
            s.worker.remove(some[:1])
            await asyncio.sleep(0.01)
        await s.until_it_agrees()
        assert (s.mirror.counts.gaps, s.mirror.counts.dumps) == (0, 1)


async def test_batches_arrive_one_by_one_and_are_few(nats_url: str, namespace: str) -> None:
    async with scene(nats_url, namespace) as s:
        s.worker.register("1")
        await s.until_it_agrees()
        before = s.worker.publisher.log.number
        for _ in range(100):
            s.worker.store(fresh(3))
            await asyncio.sleep(0)  # the publisher gets a turn after each, and far more often than each interval
        await s.until_it_agrees()
        assert s.mirror.counts.dumps == 1
        assert s.worker.publisher.log.number - before <= 20, "what gathers leaves together"


async def test_a_dropped_batch_is_seen_as_a_gap_and_healed(nats_url: str, namespace: str) -> None:
    async with scene(nats_url, namespace) as s:
        s.worker.register("1")
        await s.until_it_agrees()
        s.worker.store(fresh(kv_publisher.MAX_WAITING_BLOCKS + 1))
        assert s.worker.publisher.log.dropped == 1
        await s.until_it_agrees()
        assert (s.mirror.counts.gaps, s.mirror.counts.dumps) == (1, 2)


async def test_the_last_batch_before_silence_may_be_lost(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats_url, namespace) as s:
        s.worker.register("1")
        await s.until_it_agrees()

        async def lose(subject: str, data: bytes) -> None:
            monkeypatch.undo()
            raise BackendUnavailable("lost")

        monkeypatch.setattr(s.worker.publisher._bus, "publish_bytes", lose)
        s.worker.store(fresh(5))
        await s.until_it_agrees()
        assert s.mirror.counts.gaps == 1


async def test_another_epoch_begins_anew_and_the_old_one_is_ignored(nats_url: str, namespace: str) -> None:
    async with scene(nats_url, namespace) as s:
        s.worker.store(fresh(50))
        s.worker.register("1")
        await s.until_it_agrees()
        s.worker.leave()
        assert s.index.blocks_of("w") == set(), "at once"
        s.worker.store(fresh(5))
        s.worker.register("2")
        assert s.index.blocks_of("w") == set()
        subject = f"{namespace}.prefill.w.kv_events"
        await s.router.publish_bytes(subject, pack_batch(KvEventBatch("w", "1", 2, fresh(1), [])))
        await s.router.publish_bytes(subject, pack_batch(KvEventBatch("stranger", "1", 2, fresh(1), [])))
        await s.router.publish_bytes(subject, b"garbage")
        await s.until_it_agrees()
        assert s.mirror.counts.dumps == 2


async def test_a_worker_that_cannot_be_asked_is_without_blocks_until_it_can(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_subscriber, "DUMP_TIMEOUT_S", 0.1)
    async with scene(nats_url, namespace) as s:
        s.worker.store(fresh(50))
        s.worker.register("1")
        await s.until_it_agrees()
        s.worker.epoch = "2"  # shortly after a registration, only etcd has the new epoch
        s.mirror._instances["w"].follower.mark_stale()
        s.mirror._ask(s.mirror._instances["w"])
        await until(lambda: s.mirror.counts.failed_dumps >= 2)
        assert s.index.blocks_of("w") == set()
        assert not s.mirror.is_current("w")
        s.worker.epoch = "1"
        await s.until_it_agrees()


async def test_after_a_restart_of_nats_everyone_is_asked_and_only_changes_are_sent(
    tmp_path: Path, namespace: str
) -> None:
    async with running(NATS, tmp_path) as server, scene(server.url, namespace) as s:
        s.worker.store(fresh(50))
        s.worker.register("1")
        await s.until_it_agrees()
        assert server.process is not None
        server.process.kill()
        await server.process.wait()
        s.worker.store(fresh(5))
        await asyncio.sleep(0.2)
        await server.restart()
        await until(lambda: s.mirror.counts.dumps >= 2)
        await s.until_it_agrees()


async def test_what_an_index_has_no_room_for_is_asked_for_again_when_it_has(
    nats_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(nats_url, namespace, max_blocks=100) as s:
        others = fresh(90)
        s.index.add("other", others)
        s.worker.store(fresh(50))
        s.worker.register("1")
        await until(lambda: s.mirror.missing == 40)
        await until(lambda: "--kv-index-blocks" in caplog.text)
        metrics = CollectorRegistry()
        show_kv_mirror(metrics, s.index, s.mirror)
        shown = {m.name: m.samples[0].value for m in metrics.collect()}
        assert shown["kvmesh_kv_index_blocks"] == shown["kvmesh_kv_index_max_blocks"] == 100
        assert shown["kvmesh_kv_index_missing_blocks"] == shown["kvmesh_kv_index_refused_blocks"] == 40
        s.index.discard("other", others)
        await s.until_it_agrees()
        assert s.mirror.missing == 0
        assert s.mirror.counts.dumps == 2
        assert caplog.text.count("--kv-index-blocks") == 1


async def test_nothing_is_sent_when_nothing_has_happened(nats_url: str, namespace: str) -> None:
    async with scene(nats_url, namespace) as s:
        s.worker.store(fresh(50))
        s.worker.register("1")
        await s.until_it_agrees()
        call = FetchKvDump(epoch="1", have=s.worker.publisher.log.number)
        part = await s.router.call(f"{namespace}.prefill.w.kv_dump", call, KvDumpPart, timeout_s=PATIENCE_S)
        assert part == KvDumpPart(number=call.have or 0, unchanged=True)
        s.mirror._instances["w"].follower.mark_stale()
        s.mirror._ask(s.mirror._instances["w"])
        await until(lambda: s.mirror.counts.dumps == 2)
        assert s.agrees()


async def test_dumps_are_bounded_and_forgotten_if_no_request_continues_them(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(nats_url, namespace, InstanceBook()) as w, connect_bus(nats_url, "router") as bus:

        async def ask(**fields: object) -> KvDumpPart:
            request = replace(FetchKvDump(epoch="1"), **fields)
            return await bus.call(f"{namespace}.prefill.w.kv_dump", request, KvDumpPart, timeout_s=PATIENCE_S)

        with pytest.raises(StaleInstance):
            await ask()
        w.epoch = "1"
        w.store(fresh(DUMP_PART_BLOCKS + 1))
        parts = [await ask() for _ in range(kv_publisher.MAX_DUMPS)]
        with pytest.raises(Overloaded):
            await ask()
        with pytest.raises(StaleInstance):
            await ask(epoch="2")
        last = await ask(dump_id=parts[0].dump_id, first=DUMP_PART_BLOCKS)
        assert (len(last.blocks), last.number) == (16, parts[0].number)
        with pytest.raises(Rejected):
            await ask(dump_id=parts[0].dump_id)
        await ask()
        with pytest.raises(Overloaded):
            await ask()
        monkeypatch.setattr(kv_publisher, "DUMP_IDLE_S", 0.0)
        await ask()
        assert len(w.publisher._dumps) == 1


async def test_a_worker_without_events_is_not_followed_and_answers_nothing(nats_url: str, namespace: str) -> None:
    book = InstanceBook()
    async with (
        connect_bus(nats_url, "router") as bus,
        KvEventPublisher(bus, f"{namespace}.prefill.w", "w", lambda: "1", on=False).running() as publisher,
        follow_kv_events(bus, namespace, "prefill", book, KvIndex()) as mirror,
    ):
        book.put("w", record("w", "1", role="prefill"))
        book.put("d", record("d", "1", role="decode", kv_events=True))
        assert publisher.endpoints() == []
        assert not mirror._instances
