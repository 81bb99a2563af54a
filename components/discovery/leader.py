"""Leader election by a leased key in etcd."""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from components.backoff import Backoff
from components.credentials import EtcdAccess
from components.discovery.etcd import ANYONE, etcd_client, keep_lease, revoke_lease
from components.errors import BackendUnavailable

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # between checks for the key


class Leadership:
    """A lease that ends, by this process's clock, before another process can get the key."""

    def __init__(self) -> None:
        self._until = 0.0  # monotonic; 0 without a lease
        self._contacted_s = time.monotonic()  # latest answer of etcd

    def is_held(self) -> bool:
        return time.monotonic() < self._until

    def held_until(self, monotonic_s: float) -> None:
        self._until = monotonic_s
        if monotonic_s:
            self.contacted()

    def contacted(self) -> None:
        self._contacted_s = time.monotonic()

    def contact_age_s(self) -> float:
        return time.monotonic() - self._contacted_s


class _Campaign:
    """Runs in a thread, because etcd3 blocks."""

    def __init__(self, url: str, key: str, facts: Mapping[str, str | int], ttl_s: float, access: EtcdAccess) -> None:
        self.leadership = Leadership()
        self.stop = threading.Event()
        self._url = url
        self._access = access
        self._key = key
        self._value = json.dumps(facts)
        self._ttl_s = math.ceil(ttl_s)

    def run(self) -> None:
        backoff = Backoff()
        while not self.stop.is_set():
            try:
                with etcd_client(self._url, self._access) as client:
                    lease_id = self._win(client, backoff)
                if lease_id is not None:
                    self._lead(lease_id)
            except BackendUnavailable as exc:
                wait_s = backoff.failed()
                _report(exc, backoff)
                self.stop.wait(wait_s)
            except Exception:  # this thread must not die before the process
                log.exception("leadership lost, trying again")
                self.stop.wait(backoff.failed())
            finally:
                self.leadership.held_until(0.0)

    def _win(self, client: Any, backoff: Backoff) -> int | None:
        """Wait for the key; return its lease, or None when stopped."""
        while not self.stop.is_set():
            taken = client.get(self._key)[0] is not None
            backoff.reset()  # etcd has a quorum
            self.leadership.contacted()
            if taken:
                self.stop.wait(LOOK_S)
                continue
            asked = time.monotonic()  # before etcd starts the lease's time to live
            lease = client.lease(self._ttl_s)
            won, _ = client.transaction(
                compare=[client.transactions.create(self._key) == 0],
                success=[client.transactions.put(self._key, self._value, lease)],
                failure=[],
            )
            if won:
                self.leadership.held_until(asked + self._ttl_s)
                return int(lease.id)
            lease.revoke()
        return None

    def _lead(self, lease_id: int) -> None:
        log.info("leading", extra={"key": self._key})
        held_until = self.leadership.held_until
        try:
            keep_lease(
                self._url, lease_id, self._ttl_s, self.stop, access=self._access, renewed=held_until, failed=_report
            )
        finally:
            held_until(0.0)
            if not self.stop.is_set():
                log.warning("no longer leading", extra={"key": self._key})
        if self.stop.is_set():
            revoke_lease(self._url, lease_id, self._access)  # the next leader need not wait until it expires


def _report(exc: BackendUnavailable, backoff: Backoff) -> None:
    level = logging.ERROR if backoff.failures == 1 else logging.DEBUG
    log.log(level, "etcd cannot be reached, so no process leads", extra={"reason": exc.message})


@asynccontextmanager
async def lead(
    url: str, key: str, facts: Mapping[str, str | int], ttl_s: float, access: EtcdAccess = ANYONE
) -> AsyncIterator[Leadership]:
    """Take part in the election within the context. Yields at once.

    Args:
        key: the key that the leader holds.
        facts: the key's value, for humans.
        ttl_s: time after which a silent leader is replaced.
    """
    campaign = _Campaign(url, key, facts, ttl_s, access)
    thread = threading.Thread(target=campaign.run, name="etcd-leader")
    thread.start()
    try:
        yield campaign.leadership
    finally:
        campaign.stop.set()
        await asyncio.to_thread(thread.join)
