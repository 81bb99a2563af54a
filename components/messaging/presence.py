"""Ask instances whose records have left etcd whether they are alive.

The instance may have lost etcd, or etcd its data, so it is kept while it answers over NATS.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Final

from components.aio import background
from components.discovery.book import InstanceBook
from components.discovery.registry import Registration
from components.errors import MeshError, NobodyListens, PeerLost
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.wire.instances import AskPresent, InstanceRecord, Present

ASK_TIMEOUT_S: Final = 2.0
CALL_INTERVAL_S: Final = 5.0  # to a missing instance
JITTER_PER_INSTANCE_S: Final = 0.1  # most register again before they are called
RECONNECT_GRACE_S: Final = 5.0  # since our own reconnect, because other processes may reconnect later
MAX_CONCURRENT_CALLS: Final = 64


def present_endpoint(registration: Registration) -> Endpoint:
    async def present(asked: AskPresent) -> Present:
        registration.check_epoch(asked.epoch)
        if registration.leaving:
            raise PeerLost("this instance is leaving")
        return Present(instance_id=registration.instance_id)

    # When we leave, every peer calls this, and expects a refusal.
    return Endpoint("present", AskPresent, present, runs_inline=True, refusal_level=logging.DEBUG)


class PresenceCheck:
    def __init__(self, bus: Bus, book: InstanceBook, rng: Random) -> None:
        self._bus = bus
        self._book = book
        self._rng = rng
        self._due: dict[str, float] = {}  # monotonic; next call by key
        self._asking: set[str] = set()
        self._wake = asyncio.Event()
        book.on_missing = self._on_missing

    def _on_missing(self, key: str) -> None:
        self._due[key] = time.monotonic() + self._rng.uniform(
            0, JITTER_PER_INSTANCE_S * (len(self._book.missing_in_etcd) - 1)
        )
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._next_due()
                now = time.monotonic()
                ready = [key for key, due in self._due.items() if due <= now]
                for key in ready[: MAX_CONCURRENT_CALLS - len(self._asking)]:
                    del self._due[key]
                    if key in self._book.missing_in_etcd:  # otherwise the record is in etcd again
                        self._asking.add(key)
                        group.create_task(self._ask(key), name=f"ask {key}")

    async def _next_due(self) -> None:
        """Wait until a call is due and allowed."""
        self._wake.clear()
        wait_s = min(self._due.values(), default=float("inf")) - time.monotonic()
        if wait_s <= 0 and len(self._asking) < MAX_CONCURRENT_CALLS:
            return
        timeout_s = None if wait_s == float("inf") or wait_s <= 0 else wait_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _ask(self, key: str) -> None:
        record = self._book.at(key)
        gone = record is None or await self._is_gone(record)
        self._asking.discard(key)
        self._wake.set()
        if key not in self._book.missing_in_etcd or self._book.at(key) is not record:
            return  # a newer record gets its own call
        if gone:
            self._book.drop(key)
        else:
            again_s = CALL_INTERVAL_S + JITTER_PER_INSTANCE_S * len(self._book.missing_in_etcd)
            self._due[key] = time.monotonic() + self._rng.uniform(0.5, 1.0) * again_s

    async def _is_gone(self, record: InstanceRecord) -> bool:
        """True if NATS or the instance itself reports that it is gone. Silence proves nothing."""
        asking = AskPresent(epoch=record.epoch)
        try:
            await self._bus.call(f"{record.subject}.present", asking, Present, timeout_s=ASK_TIMEOUT_S)
        except NobodyListens:
            return self._bus.since_reconnect_s() >= RECONNECT_GRACE_S
        except PeerLost:  # it is leaving, or has another epoch
            return True
        except MeshError:
            return False
        return False


@asynccontextmanager
async def keep_present(bus: Bus, book: InstanceBook, rng: Random | None = None) -> AsyncIterator[None]:
    """Keep in `book` instances missing in etcd that answer over NATS."""
    check = PresenceCheck(bus, book, rng or Random())
    async with background(check.run(), "presence"):
        try:
            yield
        finally:
            book.on_missing = None
