"""etcd inside this process: records under leases, and each process's mirror of them."""

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

from components.aio import background
from components.discovery.book import InstanceBook
from components.discovery.registry import MakeRecord, Registration
from components.wire.instances import InstanceRecord, dump_record, load_record
from tests.faults.virtual_loop import Process

WATCH_S: Final = 0.002
NEXT_S: Final = 1e-7  # after the change before: timers of one moment have no order
LOOK_AGAIN_S: Final = 0.2


@dataclass(eq=False)
class Lease:
    expires_s: float
    kept_until_s: float = 0.0  # by a thread of a process whose event loop hangs
    is_lost: bool = False
    keys: set[str] = field(default_factory=set)


class MemoryEtcd:
    """While the server is away no record changes, and no lease expires."""

    def __init__(self, random: Random, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.away_until_s = 0.0
        self.random = random
        self._leases: list[Lease] = []
        self._records: dict[str, tuple[Lease, bytes]] = {}
        self._mirrors: list[MemoryRegistry] = []
        self._cut_off_until_s: dict[Process, float] = {}
        self._context = contextvars.Context()

    @property
    def is_away(self) -> bool:
        return _now_s() < self.away_until_s

    def cut_off(self, process: Process, seconds: float) -> None:
        """Cut off one process for a time; then its mirror reads all records again."""
        self._cut_off_until_s[process] = _now_s() + seconds
        mirror = next(mirror for mirror in self._mirrors if mirror.process is process)
        asyncio.get_running_loop().call_later(seconds, mirror.range_again, context=process.context())

    def is_away_for(self, process: Process) -> bool:
        return self.is_away or self.is_cut_off(process)

    def is_cut_off(self, process: Process) -> bool:
        return _now_s() < self._cut_off_until_s.get(process, 0.0)

    def records(self) -> dict[str, InstanceRecord]:
        return {key: load_record(record) for key, (_, record) in self._records.items()}

    def grant(self) -> Lease:
        lease = Lease(_now_s() + self.ttl_s)
        self._leases.append(lease)
        self._watch(lease)
        return lease

    def refresh(self, lease: Lease) -> bool:
        """Return whether the lease is still valid."""
        if not lease.is_lost:
            lease.expires_s = _now_s() + self.ttl_s
        return not lease.is_lost

    def put(self, key: str, record: InstanceRecord, lease: Lease) -> None:
        if (was := self._records.get(key)) is not None:
            was[0].keys.discard(key)
        lease.keys.add(key)
        self._records[key] = (lease, dump_record(record))
        for mirror in self._mirrors:
            mirror.notify(key, self._records[key][1])

    def lose(self, lease: Lease) -> None:
        if lease.is_lost:
            return
        lease.is_lost = True
        for key in sorted(lease.keys):
            del self._records[key]
            for mirror in self._mirrors:
                mirror.notify(key, None)

    def lease_of(self, instance_id: str) -> Lease | None:
        return next((lease for key, (lease, _) in self._records.items() if key.endswith(f"/{instance_id}")), None)

    def join(self, mirror: "MemoryRegistry") -> None:
        self._mirrors.append(mirror)
        mirror.book.replace_all(self.records())

    def _watch(self, lease: Lease) -> None:
        if lease.is_lost:
            return
        until_s = max(lease.expires_s, lease.kept_until_s, self.away_until_s + self.ttl_s if self.is_away else 0.0)
        if _now_s() >= until_s:
            self.lose(lease)
        else:
            asyncio.get_running_loop().call_at(until_s, self._watch, lease, context=self._context)


class MemoryRegistry:
    """Replaces `components.discovery.registry.Registry`."""

    def __init__(self, etcd: MemoryEtcd, process: Process) -> None:
        self.book = InstanceBook()
        self.process = process
        self._etcd = etcd
        self._arrival_s = 0.0
        etcd.join(self)

    def notify(self, key: str, record: bytes | None) -> None:
        """Apply a change a little later. `record`: None if it was deleted."""
        if self.process.is_dead or self._etcd.is_cut_off(self.process):
            return
        self._arrival_s = max(self._arrival_s + NEXT_S, _now_s() + WATCH_S * (1 + self._etcd.random.random()))
        asyncio.get_running_loop().call_at(self._arrival_s, self._changed, key, record, context=self.process.context())

    def range_again(self) -> None:
        """Deliver the difference as changes."""
        self.book.replace_all(self._etcd.records())

    @asynccontextmanager
    async def advertise(self, registration: Registration, make_record: MakeRecord) -> AsyncIterator[None]:
        registered = asyncio.Event()
        async with background(self._keep(registration, make_record, registered), "lease"):
            await registered.wait()
            yield

    async def _keep(self, registration: Registration, make_record: MakeRecord, registered: asyncio.Event) -> None:
        etcd = self._etcd
        record = make_record(registration.epoch)
        while True:
            while etcd.is_away_for(self.process):
                await asyncio.sleep(LOOK_AGAIN_S)
            lease = etcd.grant()
            etcd.put(f"instances/{record.role}/{record.instance_id}", record, lease)
            registered.set()
            try:
                await self._refresh_until_lost(lease)
            except asyncio.CancelledError:
                registration.leaving = True
                etcd.lose(lease)
                raise

    async def _refresh_until_lost(self, lease: Lease) -> None:
        while True:
            is_away = self._etcd.is_away_for(self.process)
            await asyncio.sleep(LOOK_AGAIN_S if is_away else self._etcd.ttl_s / 3)
            if not self._etcd.is_away_for(self.process) and not self._etcd.refresh(lease):
                return

    def _changed(self, key: str, record: bytes | None) -> None:
        if record is None:
            self.book.remove(key)
        else:
            self.book.put(key, load_record(record))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
