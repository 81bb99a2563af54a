"""Publish changes of a worker's prefix cache in numbered batches, and dump it on request."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Final, Self

from components.aio import background
from components.errors import MeshError, Overloaded, Rejected, StaleInstance
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.wire.kv_events import (
    DUMP_PART_BLOCKS,
    MAX_BATCH_BLOCKS,
    FetchKvDump,
    KvDumpPart,
    KvEventBatch,
    pack_batch,
    pack_hashes,
)
from components.wire.tokens import HASH_BYTES

EVERY_S: Final = 0.05  # between two batches; longer in a large fleet
MAX_WAITING_BLOCKS: Final = 65_536  # about 1 MB; more are dropped while NATS is unreachable
MARK_AFTER_S: Final = 0.5  # then an empty batch reveals a loss of the last one
LONGEST_MARK_PAUSE_S: Final = 60.0  # of the doubling pauses
MAX_DUMPS: Final = 8  # concurrent, in parts
DUMP_IDLE_S: Final = 10.0  # between requests for parts, until a dump is dropped


class EventLog:
    """Changes of one worker's cache as numbered batches. No I/O.

    A block stored and removed before `take_batches` is not reported. Too many changes are dropped and a number is skipped, so
    readers notice the gap. Numbers are never reused.
    """

    def __init__(self, max_waiting: int = MAX_WAITING_BLOCKS, max_batch: int = MAX_BATCH_BLOCKS) -> None:
        self.number = 0  # of the latest batch, also a dropped one
        self.dropped = 0  # numbers since start
        self._max_waiting = max_waiting
        self._max_batch = max_batch
        self._cached: dict[bytes, None] = {}  # parents first
        self._waiting: dict[bytes, bool] = {}  # stored (True) or removed since the latest batch

    def __len__(self) -> int:
        return len(self._waiting)

    def record(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        """Blocks stored (True) or removed, in order. Redundant changes are ignored."""
        cached, waiting = self._cached, self._waiting
        for block, is_stored in changes:
            if is_stored == (block in cached):
                continue
            if is_stored:
                cached[block] = None
            else:
                del cached[block]
            if block in waiting:
                del waiting[block]  # back to its state at the latest batch
            else:
                waiting[block] = is_stored
        if len(waiting) > self._max_waiting:
            self.drop()

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Count `hashes`, in order of depth, up to the last cached one, whose parents are cached, too."""
        return next((at for at in range(len(hashes), 0, -1) if hashes[at - 1] in self._cached), 0)

    def take_batches(self, instance_id: str, epoch: str) -> list[KvEventBatch]:
        waiting, self._waiting = list(self._waiting.items()), {}
        return [
            self._batch(instance_id, epoch, waiting[at : at + self._max_batch])
            for at in range(0, len(waiting), self._max_batch)
        ]

    def empty_batch(self, instance_id: str, epoch: str) -> KvEventBatch:
        """Its number reveals that a batch was missed."""
        assert not self._waiting
        return self._batch(instance_id, epoch, [])

    def drop(self) -> None:
        self._waiting = {}
        self.number += 1
        self.dropped += 1

    def dump(self) -> bytes:
        """All cached hashes as of the latest batch.

        Call `take_batches` first. If a block is stored and removed before the next batch, `record` drops both changes, and
        readers of a dump with that block would keep it.
        """
        assert not self._waiting
        return pack_hashes(self._cached)

    def _batch(self, instance_id: str, epoch: str, changes: list[tuple[bytes, bool]]) -> KvEventBatch:
        self.number += 1
        stored = [block for block, is_stored in changes if is_stored]
        removed = [block for block, is_stored in changes if not is_stored]
        return KvEventBatch(instance_id, epoch, self.number, stored, removed)


@dataclass(slots=True)
class _Dump:
    number: int
    blocks: bytes
    asked_s: float  # monotonic; latest request


class KvEventPublisher:
    """Publishes batches of KV events and answers dumps, unless `on` is False.

    Args:
        epoch: returns "" while the worker is not registered.
        rest_s: returns the minimum seconds between batches.
    """

    def __init__(
        self,
        bus: Bus,
        subject: str,
        instance_id: str,
        epoch: Callable[[], str],
        *,
        on: bool = True,
        rest_s: Callable[[], float] = lambda: EVERY_S,
    ) -> None:
        self.log = EventLog()
        self._bus = bus
        self._subject = f"{subject}.kv_events"
        self._instance_id = instance_id
        self._epoch = epoch
        self._on = on
        self._rest_s = rest_s
        self._unsent: deque[KvEventBatch] = deque()
        self._dumps: dict[str, _Dump] = {}
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        if not self._on:
            yield self
            return
        async with background(self.run(), "kv-events"):
            yield self

    def record(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        self.log.record(changes)
        if self.log:
            self._wake.set()

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("kv_dump", FetchKvDump, self.dump, is_idempotent=True)] if self._on else []

    async def dump(self, request: FetchKvDump) -> KvDumpPart:
        """Begin or continue a dump.

        Raises: StaleInstance; Overloaded; Rejected, if the dump was dropped.
        """
        if not self._epoch() or request.epoch != self._epoch():
            raise StaleInstance(f"instance {self._instance_id} has epoch {self._epoch() or 'none'} now")
        return self._next_part(request) if request.dump_id else self._begin(request)

    async def run(self) -> None:
        pause_s = MARK_AFTER_S
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, LONGEST_MARK_PAUSE_S)
                self._batch_changes()
                self._unsent.append(self.log.empty_batch(self._instance_id, self._epoch()))
            else:
                pause_s = MARK_AFTER_S
                self._wake.clear()
                self._batch_changes()
            await self._send()
            await asyncio.sleep(self._rest_s())

    def _batch_changes(self) -> None:
        if self._epoch():
            self._unsent.extend(self.log.take_batches(self._instance_id, self._epoch()))
        elif self.log:  # a worker that is not registered has no readers
            self.log.drop()

    async def _send(self) -> None:
        while self._unsent:
            batch = self._unsent.popleft()
            if not batch.epoch:
                continue
            try:
                await self._bus.publish_bytes(self._subject, pack_batch(batch))
            except MeshError:  # readers notice the missing number
                self.log.dropped += 1

    def _begin(self, request: FetchKvDump) -> KvDumpPart:
        self._batch_changes()
        self._wake.set()
        if request.have == self.log.number:
            return KvDumpPart(number=self.log.number, unchanged=True)
        dump = _Dump(self.log.number, self.log.dump(), time.monotonic())
        dump_id = ""
        if len(dump.blocks) > DUMP_PART_BLOCKS * HASH_BYTES:
            dump_id = self._keep(dump)
        return _part(dump, dump_id, 0)

    def _keep(self, dump: _Dump) -> str:
        for old_id, old in list(self._dumps.items()):
            if dump.asked_s - old.asked_s > DUMP_IDLE_S:
                del self._dumps[old_id]
        if len(self._dumps) >= MAX_DUMPS:
            raise Overloaded(f"{MAX_DUMPS} dumps are being fetched from {self._instance_id}")
        dump_id = token_hex(4)
        self._dumps[dump_id] = dump
        return dump_id

    def _next_part(self, request: FetchKvDump) -> KvDumpPart:
        dump = self._dumps.get(request.dump_id)
        if dump is None or request.first < 0:
            raise Rejected(f"{self._instance_id} has no dump {request.dump_id[:16]!r} any more", param="dump_id")
        dump.asked_s = time.monotonic()
        part = _part(dump, request.dump_id, request.first)
        if request.first + DUMP_PART_BLOCKS >= part.num_blocks:
            del self._dumps[request.dump_id]
        return part


def _part(dump: _Dump, dump_id: str, first: int) -> KvDumpPart:
    blocks = dump.blocks[first * HASH_BYTES : (first + DUMP_PART_BLOCKS) * HASH_BYTES]
    return KvDumpPart(number=dump.number, blocks=blocks, num_blocks=len(dump.blocks) // HASH_BYTES, dump_id=dump_id)
