"""This process's place in etcd: its own leased record, and the mirror of everyone else's.

etcd3 blocks, so two threads own it: one keeps the lease, one follows the prefix. Both run for ever: an etcd that is away is
reported and tried again, never a reason to exit.
"""

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any, Final

from components.discovery.book import InstanceBook
from components.discovery.etcd import Backoff, endpoints, etcd_client, keep_lease
from components.discovery.etcd_stubs import etcdrpc
from components.errors import BackendUnavailable, MalformedMessage, StaleInstance
from components.wire.instances import InstanceRecord, dump_record, load_record

log = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 0.2

MakeRecord = Callable[[str], InstanceRecord]  # epoch → record


class Registration:
    """One process's leased record; made before anything is served, so that handlers can check epochs against it."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.epoch = ""  # empty until it is being registered, new after a lease was lost
        self._on_lost: list[Callable[[], Awaitable[None]]] = []

    def is_held(self) -> bool:
        """Whether this process stands in etcd, as far as it knows."""
        return self.epoch != ""

    def check_epoch(self, epoch: str) -> None:
        """Raises: StaleInstance, for a message meant for an earlier registration of this process."""
        if epoch != self.epoch:
            raise StaleInstance(f"instance {self.instance_id} has epoch {self.epoch or 'none'} now, not {epoch}")

    def on_lost(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` when the lease is gone: others believe this process dead and may reuse what it writes into.

        The process registers again only when all callbacks have returned.
        """
        self._on_lost.append(callback)

    def taking(self, epoch: str) -> None:
        """The record is about to stand in etcd under this epoch; "": it did not come there."""
        self.epoch = epoch

    def held(self, epoch: str, registered: asyncio.Event) -> None:
        """The record stands in etcd under this epoch."""
        self.epoch = epoch
        registered.set()

    async def lost(self) -> None:
        """Tell everyone who asked, and wait until they behave so."""
        self.epoch = ""
        for callback in self._on_lost:
            await callback()


class Registry:
    """The mesh's directory as one process sees it."""

    def __init__(self, url: str, namespace: str, ttl_s: float) -> None:
        endpoints(url)  # a bad address fails here, not in a thread
        self.book = InstanceBook()
        self.connected = False  # whether the mirror follows etcd at the moment; a look from any thread
        self._url = url
        self._prefix = f"{namespace}/instances/"
        self._ttl_s = math.ceil(ttl_s)
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._watch_call: Any = None
        self._synced = asyncio.Event()

    @asynccontextmanager
    async def advertise(self, registration: Registration, make_record: MakeRecord) -> AsyncIterator[None]:
        """Registered with `make_record(epoch)` while inside; leaving revokes the lease, so that nobody routes here any more."""
        registered = asyncio.Event()
        stop = threading.Event()
        thread = threading.Thread(
            target=self._keep_lease, args=(registration, make_record, registered, stop), name="etcd-lease"
        )
        thread.start()
        try:
            await registered.wait()
            yield
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)

    def _keep_lease(
        self, registration: Registration, make_record: MakeRecord, registered: asyncio.Event, stop: threading.Event
    ) -> None:
        backoff = Backoff()
        while not stop.is_set():
            try:
                with etcd_client(self._url) as client:
                    expires = time.monotonic() + self._ttl_s  # etcd counts from a moment later
                    lease = client.lease(self._ttl_s)
                    record = make_record(token_hex(4))
                    self._loop.call_soon_threadsafe(registration.taking, record.epoch)  # others may quote it at once
                    client.put(f"{self._prefix}{record.role}/{record.instance_id}", dump_record(record), lease)
                    backoff.reset()
                    self._loop.call_soon_threadsafe(registration.held, record.epoch, registered)
                    try:
                        keep_lease(self._url, client, lease, expires, stop)
                    finally:
                        # Others treat this process as dead now, so it must behave so before it registers again.
                        if not stop.is_set():
                            log.warning("lease lost, registering again", extra={"epoch": record.epoch})
                            self._behave_lost(registration, stop)
                    if stop.is_set():
                        lease.revoke()
            except BackendUnavailable as exc:
                self._loop.call_soon_threadsafe(registration.taking, "")
                self._report(exc, backoff)
                stop.wait(backoff.failed())
            except Exception:  # the edge of this thread, which must not die before the process
                self._loop.call_soon_threadsafe(registration.taking, "")
                log.exception("lease not kept, trying again")
                stop.wait(backoff.failed())

    def _behave_lost(self, registration: Registration, stop: threading.Event) -> None:
        """Return when `registration.lost` has, or when the process leaves anyway."""
        behaving = asyncio.run_coroutine_threadsafe(registration.lost(), self._loop)
        while not stop.is_set() and not concurrent.futures.wait((behaving,), timeout=LOOK_AGAIN_S).done:
            continue
        if behaving.done():
            behaving.result()

    def _mirror(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                with etcd_client(self._url) as client:
                    backoff.reset()
                    self._follow(client)
            except BackendUnavailable as exc:
                if not self._stop.is_set():
                    self.connected = False
                    self._report(exc, backoff)
                    self._stop.wait(backoff.failed())
            except Exception:  # the edge of this thread, which must not die before the process
                self.connected = False
                log.exception("mirror failed, trying again")
                self._stop.wait(backoff.failed())

    def _follow(self, client: Any) -> None:
        """Range, tell the difference, watch from the next revision on; returns when etcd cancels the watch.

        A watch whose revision was compacted is cancelled and never resumes: ranging again is the only cure.
        """
        snapshot = client.get_prefix_response(self._prefix)
        records = {_text(kv.key): record for kv in snapshot.kvs if (record := _load(kv.key, kv.value)) is not None}
        self.connected = True
        self._loop.call_soon_threadsafe(self._snapshot_taken, records)
        create = etcdrpc.WatchCreateRequest(
            key=self._prefix.encode(),
            range_end=f"{self._prefix[:-1]}0".encode(),  # "0" follows "/": every key under the prefix
            start_revision=snapshot.header.revision + 1,
        )
        ended = threading.Event()
        self._watch_call = etcdrpc.WatchStub(client.channel).Watch(_requests(create, ended))
        try:
            if self._stop.is_set():  # close() may have looked for a call to cancel just before there was one
                return
            for response in self._watch_call:
                if response.canceled or response.compact_revision:
                    log.warning("watch cancelled, reading again", extra={"compacted": response.compact_revision})
                    return
                for event in response.events:
                    self._loop.call_soon_threadsafe(self._changed, event.kv.key, event.kv.value, event.type)
        finally:
            ended.set()
            self._watch_call.cancel()

    def _snapshot_taken(self, records: dict[str, InstanceRecord]) -> None:
        self.book.replace_all(records)
        self._synced.set()

    def _changed(self, key: bytes, value: bytes, kind: int) -> None:
        record = None if kind == 1 else _load(key, value)  # 1: mvccpb.Event.DELETE
        if record is None:  # one that cannot be read is not there, as after a fresh range
            self.book.remove(_text(key))
        else:
            self.book.put(_text(key), record)

    def _report(self, exc: BackendUnavailable, backoff: Backoff) -> None:
        level = logging.ERROR if backoff.since is None else logging.DEBUG
        log.log(level, "etcd cannot be reached, trying again", extra={"reason": exc.message})

    def close(self) -> None:
        """End the mirror's thread."""
        self._stop.set()
        if self._watch_call is not None:
            self._watch_call.cancel()


@asynccontextmanager
async def join_registry(url: str, namespace: str, ttl_s: float) -> AsyncIterator[Registry]:
    """The registry, its mirror filled once; while etcd is away this waits and says so."""
    registry = Registry(url, namespace, ttl_s)
    thread = threading.Thread(target=registry._mirror, name="etcd-mirror")
    thread.start()
    try:
        await registry._synced.wait()
        yield registry
    finally:
        registry.close()
        await asyncio.to_thread(thread.join)


def _requests(create: Any, ended: threading.Event) -> Any:
    """The request side of one watch: it must stay open as long as the watch, or etcd ends it."""
    yield etcdrpc.WatchRequest(create_request=create)
    ended.wait()


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


def _load(key: bytes, value: bytes) -> InstanceRecord | None:
    try:
        return load_record(value)
    except MalformedMessage as exc:
        log.warning("instance record not understood", extra={"key": _text(key), "cause": str(exc)})
        return None
