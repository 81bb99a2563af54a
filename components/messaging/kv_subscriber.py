"""A router's mirror of a role's caches, from KV events."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

from nats.aio.msg import Msg

from components.aio import background
from components.discovery.book import InstanceBook
from components.errors import MalformedMessage, MeshError
from components.messaging.bus import Bus
from components.messaging.fan_out import SubscriptionChoice
from components.messaging.following import subscribed
from components.messaging.refusals import GAP, STRANGER
from components.routing.kv_following import BlockIndex, KvFollower
from components.wire.instances import InstanceRecord, Role
from components.wire.kv_events import FetchKvDump, KvDumpPart, unpack_batch, unpack_hashes

log = logging.getLogger(__name__)

DUMP_TIMEOUT_S: Final = 2.0  # for each part of a dump
DUMPS_AT_ONCE: Final = 16
SLICE_BLOCKS: Final = 1024  # of a dump per turn of the event loop; about a millisecond
FIRST_WAIT_S: Final = 0.1  # after a failed dump; doubles
LAST_WAIT_S: Final = 5.0
BACKOFF_RESET_S: Final = 10.0  # without a dump
CHECK_INTERVAL_S: Final = 0.5
SLICES_PER_CHECK: Final = 32
SWEEP_REST_S: Final = 0.01  # between two slices


@dataclass(slots=True)
class MirrorCounts:
    batches: int = 0
    gaps: int = 0
    dumps: int = 0  # also those without changes
    failed_dumps: int = 0


@dataclass(slots=True)
class _Instance:
    record: InstanceRecord
    follower: KvFollower
    task: asyncio.Task[None] | None = None  # fetches a dump
    wait_s: float = 0.0  # before the next dump
    dumped: float = 0.0  # monotonic


class KvMirror:
    def __init__(self, bus: Bus, role: Role, book: InstanceBook, index: BlockIndex, rng: Random) -> None:
        self.counts = MirrorCounts()
        self._bus = bus
        self._role = role
        self._index = index
        self._rng = rng
        self._instances: dict[str, _Instance] = {}
        self._asking: set[str] = set()  # instances that need a dump
        self._has_warned_full = False
        self._asked_again: _Instance | None = None  # gets a new dump, because its blocks had no room
        self._wake = asyncio.Event()
        self._turns = asyncio.Semaphore(DUMPS_AT_ONCE)
        book.follow(role, self._changed)

    @property
    def missing(self) -> int:
        """Upper bound of blocks without room in the index."""
        return sum(instance.follower.missing for instance in self._instances.values())

    def is_current(self, instance_id: str) -> bool:
        instance = self._instances.get(instance_id)
        return instance is not None and not instance.follower.needs_dump

    async def receive(self, message: Msg) -> None:
        try:
            batch = unpack_batch(message.data)
        except MalformedMessage as exc:
            self._bus.refusals.count("kv_events", exc)
            log.warning("KV events refused", extra={"cause": exc.message})
            return
        instance = self._instances.get(batch.instance_id)
        if instance is None or instance.record.epoch != batch.epoch:
            self._bus.refusals.count("kv_events", STRANGER)
            return
        self.counts.batches += 1
        follower = instance.follower
        gaps = follower.gaps
        follower.received(batch)
        if follower.gaps > gaps:
            self.counts.gaps += 1
            self._bus.refusals.count("kv_events", GAP)
            self._ask(instance)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for instance_id in self._asking:
                    instance = self._instances[instance_id]
                    if instance.task is None:
                        instance.task = tasks.create_task(self._sync(instance), name=f"kv-dump {instance_id}")
                self._asking.clear()

    async def check(self) -> None:
        """Fetch all dumps after a reconnect, as events were lost, and those with refused blocks once there is room."""
        seen = self._bus.client.stats["reconnects"]
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            before, seen = seen, self._bus.client.stats["reconnects"]
            if seen != before:
                for instance in self._instances.values():
                    instance.follower.mark_stale()
                    self._ask(instance)
            self._refetch_refused()
            await self._sweep()

    async def _sweep(self) -> None:
        """Free the room of departed instances, if others need it. New blocks do so, too, but there may be none."""
        for _ in range(SLICES_PER_CHECK):
            if not (self.missing and self._index.sweep(SLICE_BLOCKS)):
                return
            await asyncio.sleep(SWEEP_REST_S)

    def _refetch_refused(self) -> None:
        without = [i for i in self._instances.values() if i.follower.missing and not i.follower.needs_dump]
        if without and not self._has_warned_full:
            self._has_warned_full = True
            facts = {"role": self._role, "missing_blocks": self.missing}
            log.warning(
                "the KV index is full, so further cached blocks are not found: raise --kv-index-blocks", extra=facts
            )
        asked = self._asked_again
        if asked is not None and asked.follower.needs_dump and self._is_followed(asked):
            return
        self._asked_again = None
        if without and self._index.has_room:
            self._asked_again = instance = max(without, key=lambda i: i.follower.missing)
            instance.follower.mark_stale()
            self._ask(instance)

    def _ask(self, instance: _Instance) -> None:
        self._asking.add(instance.record.instance_id)
        self._wake.set()

    async def _sync(self, instance: _Instance) -> None:
        """Fetch dumps until the instance is current or not followed."""
        follower = instance.follower
        while follower.needs_dump and self._is_followed(instance):
            if time.monotonic() - instance.dumped > BACKOFF_RESET_S:
                instance.wait_s = 0.0
            await asyncio.sleep(instance.wait_s * self._rng.uniform(0.5, 1.0))
            instance.wait_s = min(max(FIRST_WAIT_S, 2 * instance.wait_s), LAST_WAIT_S)
            instance.dumped = time.monotonic()
            try:
                async with self._turns:
                    await self._fetch(instance)
            except MeshError as exc:
                self.counts.failed_dumps += 1
                if self._is_followed(instance):
                    follower.forget()
                facts = {"instance": instance.record.instance_id, "cause": exc.message}
                log.info("KV dump failed, trying again", extra=facts)
        instance.task = None

    async def _fetch(self, instance: _Instance) -> None:
        record, follower = instance.record, instance.follower
        have = follower.dump_asked()
        part = await self._part(record, FetchKvDump(epoch=record.epoch, have=have))
        if part.unchanged and have is not None:
            if self._is_followed(instance):
                self._end(follower, have)
            return
        if self._is_followed(instance):
            follower.dump_begins()
        first = 0
        while self._is_followed(instance):
            blocks = unpack_hashes(part.blocks)
            for at in range(0, len(blocks), SLICE_BLOCKS):
                follower.dump_part(blocks[at : at + SLICE_BLOCKS])
                await asyncio.sleep(0)
                if not self._is_followed(instance):
                    return
            first += len(blocks)
            if first >= part.num_blocks:
                self._end(follower, part.number)
                return
            if not blocks:
                raise MalformedMessage(f"a dump of {part.num_blocks} blocks ends after {first}")
            part = await self._part(record, FetchKvDump(epoch=record.epoch, dump_id=part.dump_id, first=first))

    def _end(self, follower: KvFollower, number: int) -> None:
        self.counts.dumps += 1
        gaps = follower.gaps
        follower.dump_ends(number)
        self.counts.gaps += follower.gaps - gaps

    async def _part(self, record: InstanceRecord, request: FetchKvDump) -> KvDumpPart:
        return await self._bus.call(f"{record.subject}.kv_dump", request, KvDumpPart, timeout_s=DUMP_TIMEOUT_S)

    def _is_followed(self, instance: _Instance) -> bool:
        return self._instances.get(instance.record.instance_id) is instance

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is not None and now is not None and was.epoch == now.epoch:
            return
        if was is not None and was.instance_id in self._instances:
            instance = self._instances.pop(was.instance_id)
            instance.follower.forget()
            self._asking.discard(was.instance_id)
        if now is not None and now.kv_events:
            follower = KvFollower(now.instance_id, now.epoch, self._index)
            self._instances[now.instance_id] = instance = _Instance(now, follower)
            self._ask(instance)


@asynccontextmanager
async def follow_kv_events(
    bus: Bus,
    namespace: str,
    role: Role,
    book: InstanceBook,
    index: BlockIndex,
    *,
    rng: Random | None = None,
    following: SubscriptionChoice | None = None,
) -> AsyncIterator[KvMirror]:
    """Mirror in `index` the caches of the instances in `book`.

    Args:
        book: `following.followed`, if `following` is given.
    """
    mirror = KvMirror(bus, role, book, index, rng or Random())
    async with (
        subscribed(bus, f"{namespace}.{role}.*.kv_events", mirror.receive, following),
        background(mirror.run(), f"kv-dumps-{role}"),
        background(mirror.check(), f"kv-check-{role}"),
    ):
        yield mirror
