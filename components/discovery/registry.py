"""This process's leased record in etcd, and a mirror of all records.

etcd3 blocks, so one thread renews the lease, and one watches the prefix. An etcd outage removes no process from the mesh.
"""

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from secrets import token_hex
from typing import Any, Final

from components.backoff import Backoff
from components.credentials import EtcdAccess
from components.discovery.book import InstanceBook
from components.discovery.etcd import (
    ANYONE,
    CALL_TIMEOUT_S,
    HAS_LEADER,
    check_access,
    etcd_client,
    keep_lease,
    revoke_lease,
)
from components.discovery.etcd_stubs import etcdrpc
from components.errors import BackendUnavailable, MalformedMessage, StaleInstance
from components.telemetry.waiting import waiting_logged
from components.wire.instances import InstanceRecord, dump_record, load_record

log = logging.getLogger(__name__)

PAGE: Final = 256  # records per read, about a megabyte
JITTER_PER_INSTANCE_S: Final = 0.02  # instances must not all write lost records at once

MakeRecord = Callable[[str], InstanceRecord]  # epoch → record


class Registration:
    def __init__(self, instance_id: str, epoch: str | None = None) -> None:
        self.instance_id = instance_id
        self.epoch = epoch or token_hex(4)
        self.leased_until_s = 0.0  # monotonic; set by the lease thread
        self.leaving = False
        self.revision = 0  # etcd's at the last write; used by the lease thread only, as is `reads`
        self.reads = 0  # reads that the mirror had started by then

    def is_leased(self) -> bool:
        return time.monotonic() < self.leased_until_s

    def check_epoch(self, epoch: str) -> None:
        if epoch != self.epoch:
            raise StaleInstance(f"instance {self.instance_id} has epoch {self.epoch}, not {epoch}")

    def renewed(self, until_s: float) -> None:
        self.leased_until_s = until_s


class Registry:
    def __init__(self, url: str, namespace: str, ttl_s: float, access: EtcdAccess = ANYONE) -> None:
        check_access(url, access)
        self.book = InstanceBook()
        self.connected = False  # the mirror is watching etcd; readable from any thread
        self._contacted_s = time.monotonic()  # etcd's latest answer; written by both threads
        self._url = url
        self._access = access
        self._prefix = _prefix(namespace)
        self._ttl_s = math.ceil(ttl_s)
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._watch_call: Any = None
        self._synced = asyncio.Event()
        self._revision = 0  # etcd's, as of the book; set by the event loop, as is `_reads_taken`
        self._reads = 0  # reads of the whole prefix, started by the mirror thread
        self._reads_taken = 0  # the latest in the book

    def contact_age_s(self) -> float:
        """Time since etcd last answered. A registered process calls it after each third of its lease's lifetime."""
        return time.monotonic() - self._contacted_s

    def _contacted(self) -> None:
        self._contacted_s = time.monotonic()

    @asynccontextmanager
    async def advertise(self, registration: Registration, make_record: MakeRecord) -> AsyncIterator[None]:
        """Register within the context. Leaving it revokes the lease: no new requests arrive."""
        registered = asyncio.Event()
        stop = threading.Event()
        record = make_record(registration.epoch)
        if (other := self.book.at(_key(self._prefix, record.role, record.instance_id))) is not None:
            log.warning(
                "this instance id is already registered: if that process is alive, give each its own MESH_INSTANCE_ID",
                extra={"instance": record.instance_id, "host": other.host, "pid": other.pid},
            )
        thread = threading.Thread(
            target=self._stay_registered, args=(registration, record, registered, stop), name="etcd-lease"
        )
        thread.start()
        try:
            async with waiting_logged("etcd", self._url):
                await registered.wait()
            yield
        finally:
            registration.leaving = True
            stop.set()
            await asyncio.to_thread(thread.join)

    def _stay_registered(
        self, registration: Registration, record: InstanceRecord, registered: asyncio.Event, stop: threading.Event
    ) -> None:
        backoff = Backoff()
        while not stop.is_set():
            try:
                lease_id = self._register(registration, record)
                backoff.reset()
                self._loop.call_soon_threadsafe(registered.set)
                renewed = partial(self._renewed, registration, record, lease_id)
                keep_lease(
                    self._url, lease_id, self._ttl_s, stop, access=self._access, renewed=renewed, failed=self._report
                )
                if stop.is_set():
                    revoke_lease(self._url, lease_id, self._access)
                    return
                log.warning("etcd dropped the lease, registering again", extra={"epoch": record.epoch})
                stop.wait(random.uniform(0, JITTER_PER_INSTANCE_S * len(self.book)))
            except BackendUnavailable as exc:
                wait_s = backoff.failed()
                self._report(exc, backoff)
                stop.wait(wait_s)
            except Exception:  # this thread must not die before the process
                log.exception("lease not kept, trying again")
                stop.wait(backoff.failed())

    def _register(self, registration: Registration, record: InstanceRecord) -> int:
        with etcd_client(self._url, self._access) as client:
            began_s = time.monotonic()  # before etcd starts the lease's time to live
            lease_id = int(client.lease(self._ttl_s).id)
            self._write(client, registration, record, lease_id)
        registration.renewed(began_s + self._ttl_s)
        self._contacted()
        return lease_id

    def _write(self, client: Any, registration: Registration, record: InstanceRecord, lease_id: int) -> None:
        put = client.put(_key(self._prefix, record.role, record.instance_id), dump_record(record), lease_id)
        registration.revision = int(put.header.revision)
        registration.reads = self._reads

    def _renewed(self, registration: Registration, record: InstanceRecord, lease_id: int, until_s: float) -> None:
        registration.renewed(until_s)
        self._contacted()
        key = _key(self._prefix, record.role, record.instance_id)
        # A read that began after our write includes it, even if etcd has since lost its data and its revision is lower.
        if self._revision < registration.revision and self._reads_taken <= registration.reads:
            return
        if self.connected and (self.book.at(key) is None or key in self.book.missing_in_etcd):
            log.warning("the record is missing in etcd, writing it again", extra={"epoch": record.epoch})
            with etcd_client(self._url, self._access) as client:
                self._write(client, registration, record, lease_id)

    def _mirror(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                with etcd_client(self._url, self._access) as client:
                    self._follow(client, backoff)
            except BackendUnavailable as exc:
                if not self._stop.is_set():
                    self.connected = False
                    wait_s = backoff.failed()
                    self._report(exc, backoff)
                    self._stop.wait(wait_s)
            except Exception:
                self.connected = False
                log.exception("mirror failed, trying again")
                self._stop.wait(backoff.failed())

    def _follow(self, client: Any, backoff: Backoff) -> None:
        """Read the prefix, then watch it until etcd cancels the watch, which cannot resume after a compaction."""
        self._reads += 1
        reads = self._reads
        records, revision = self._read(client)
        backoff.reset()
        self.connected = True
        self._contacted()
        self._loop.call_soon_threadsafe(self._snapshot_taken, records, revision, reads)
        create = etcdrpc.WatchCreateRequest(
            key=self._prefix.encode(), range_end=_end(self._prefix.encode()), start_revision=revision + 1
        )
        ended = threading.Event()
        self._watch_call = etcdrpc.WatchStub(client.channel).Watch(_requests(create, ended), metadata=HAS_LEADER)
        try:
            if self._stop.is_set():  # close() may have found no call to cancel
                return
            for response in self._watch_call:
                self._contacted()
                if response.canceled or response.compact_revision:
                    facts = {"compacted": response.compact_revision, "cause": response.cancel_reason}
                    log.warning("watch cancelled, reading again", extra=facts)
                    return
                if response.created and response.header.revision < revision:
                    log.warning("etcd is behind what was read, reading again", extra={"revision": revision})
                    return  # this watch would only start when etcd reaches the old revision again
                for event in response.events:
                    self._loop.call_soon_threadsafe(self._changed, event.kv, event.type)
        finally:
            ended.set()
            self._watch_call.cancel()

    def _read(self, client: Any) -> tuple[dict[str, InstanceRecord], int]:
        records: dict[str, InstanceRecord] = {}
        start, revision = self._prefix.encode(), 0
        while True:
            page = client.kvstub.Range(
                etcdrpc.RangeRequest(key=start, range_end=_end(self._prefix.encode()), limit=PAGE, revision=revision),
                CALL_TIMEOUT_S,
            )
            revision = revision or page.header.revision
            for kv in page.kvs:
                if (record := _load(kv.key, kv.value)) is not None:
                    records[_text(kv.key)] = record
            if not page.more:
                return records, revision
            start = page.kvs[-1].key + b"\0"  # the next possible key

    def _snapshot_taken(self, records: dict[str, InstanceRecord], revision: int, reads: int) -> None:
        self.book.replace_all(records)
        self._revision = revision  # not max(), because an etcd that lost its data restarts at 1
        self._reads_taken = reads
        self._synced.set()

    def _changed(self, kv: Any, kind: int) -> None:
        record = None if kind == 1 else _load(kv.key, kv.value)  # 1: mvccpb.Event.DELETE
        if record is None:  # an unreadable record is absent
            self.book.remove(_text(kv.key))
        else:
            self.book.put(_text(kv.key), record)
        self._revision = int(kv.mod_revision)

    def _report(self, exc: BackendUnavailable, backoff: Backoff) -> None:
        level = logging.ERROR if backoff.failures == 1 else logging.DEBUG
        log.log(level, "etcd cannot be reached, trying again", extra={"reason": exc.message})

    def close(self) -> None:
        self._stop.set()
        if self._watch_call is not None:
            self._watch_call.cancel()


@asynccontextmanager
async def join_registry(url: str, namespace: str, ttl_s: float, access: EtcdAccess = ANYONE) -> AsyncIterator[Registry]:
    """Wait for etcd and yield a registry whose mirror is filled."""
    registry = Registry(url, namespace, ttl_s, access)
    thread = threading.Thread(target=registry._mirror, name="etcd-mirror")
    thread.start()
    try:
        async with waiting_logged("etcd", url):
            await registry._synced.wait()
        yield registry
    finally:
        registry.close()
        await asyncio.to_thread(thread.join)


def check_readable(url: str, namespace: str, access: EtcdAccess = ANYONE) -> None:
    """Blocks. Raises: NotAllowed, or another BackendUnavailable."""
    first = _prefix(namespace).encode()
    with etcd_client(url, access) as client:
        client.kvstub.Range(etcdrpc.RangeRequest(key=first, range_end=_end(first), count_only=True), CALL_TIMEOUT_S)


def remove_record(url: str, namespace: str, role: str, instance_id: str, access: EtcdAccess = ANYONE) -> None:
    """Remove an ended process's record before its lease expires. Blocks. Raises: BackendUnavailable."""
    with etcd_client(url, access) as client:
        client.delete(_key(_prefix(namespace), role, instance_id))


def _prefix(namespace: str) -> str:
    return f"{namespace}/instances/"


def _end(prefix: bytes) -> bytes:
    return prefix[:-1] + b"0"  # "0" follows "/"


def _key(prefix: str, role: str, instance_id: str) -> str:
    return f"{prefix}{role}/{instance_id}"


def _requests(create: Any, ended: threading.Event) -> Any:
    yield etcdrpc.WatchRequest(create_request=create)
    ended.wait()  # the watch ends with its request stream


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


def _load(key: bytes, value: bytes) -> InstanceRecord | None:
    """Return the record; None if it is unreadable or another instance's, because a process may write only its own key."""
    name = _text(key)
    try:
        record = load_record(value)
    except MalformedMessage as exc:
        log.warning("unreadable instance record", extra={"key": name, "cause": str(exc)})
        return None
    if not name.endswith(f"/{record.role}/{record.instance_id}"):
        cause = f"it names {record.role} {record.instance_id[:80]!r}"
        log.warning("unreadable instance record", extra={"key": name, "cause": cause})
        return None
    return record
