"""Events of records, of etcd and of a process's connection, in every order: the book is right, and our record stays."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from types import SimpleNamespace
from typing import Any, Final

import pytest

from components.discovery import registry as registry_module
from components.discovery.etcd_stubs import etcdrpc
from components.discovery.registry import Registration, Registry
from components.errors import BackendUnavailable
from components.wire.instances import InstanceRecord, dump_record, load_record
from tests.components.discovery.records import record

pytestmark = pytest.mark.anyio

OURS: Final = "ns/instances/decode/ours"
OTHER: Final = "ns/instances/decode/other"
TTL_S: Final = 9.0
RENEWALS: Final = 3  # within the lifetime of a lease
TWIN: Final = 99  # lease of another process with our instance id


@dataclass
class Store:
    """The data on etcd's disk."""

    revision: int = 1
    oldest: int = 0  # revision for a watch
    leases: set[int] = field(default_factory=set)
    records: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # value and lease
    history: list[tuple[int, str, bytes | None]] = field(default_factory=list)

    def put(self, key: str, value: bytes, lease: int) -> None:
        self.revision += 1
        self.records[key] = value, lease
        self.history.append((self.revision, key, value))

    def delete(self, key: str) -> None:
        if self.records.pop(key, None) is not None:
            self.revision += 1
            self.history.append((self.revision, key, None))

    def end(self, lease: int) -> None:
        self.leases.discard(lease)
        for key in [key for key, (_, of) in self.records.items() if of == lease]:
            self.delete(key)


class Etcd:
    """A server and its client. Calls take no time."""

    def __init__(self) -> None:
        self.store = Store()
        self.granted = 0
        self.needless = 0  # writes that change nothing
        self.starts = 0
        self.kvstub = self.channel = self

    def restart(self, store: Store) -> None:
        self.store = store
        self.starts += 1

    def lease(self, _ttl_s: int) -> Any:
        self.granted += 1
        self.store.leases.add(self.granted)
        return SimpleNamespace(id=self.granted)

    def put(self, key: str, value: bytes, lease: int) -> Any:
        self.needless += self.store.records.get(key) == (value, lease)
        self.store.put(key, value, lease)
        return SimpleNamespace(header=SimpleNamespace(revision=self.store.revision))

    def Range(self, _request: Any, _timeout_s: float) -> Any:
        kvs = [SimpleNamespace(key=key.encode(), value=value) for key, (value, _) in self.store.records.items()]
        return SimpleNamespace(kvs=kvs, more=False, header=SimpleNamespace(revision=self.store.revision))


class Process:
    """A registered process. One event of the order happens before each response of etcd to its watch."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self.etcd = Etcd()
        self.is_broken = False  # the connection of the watch
        self.seen: list[tuple[InstanceRecord | None, InstanceRecord | None]] = []
        self._callbacks: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._order = deque((*order, *["settle"] * (2 * RENEWALS)))
        self._stopped = False
        self.registry = Registry("etcd", "ns", TTL_S)
        self.registry._loop = self  # type: ignore[assignment]
        self.registry._stop = self  # type: ignore[assignment]
        self.registry.book.subscribe(lambda was, now: self.seen.append((was, now)))
        self._registration = Registration("ours", "e1")
        self._record = record("ours", "e1")
        self.lease = 0

    def run(self) -> None:
        """Register, and run the mirror until the last event."""
        self.lease = self.registry._register(self._registration, self._record)
        self.registry._mirror()
        self.run_callbacks()

    def renew(self) -> None:
        """Renew the lease, as its thread does three times in its lifetime."""
        if self.lease in self.etcd.store.leases:
            self.registry._renewed(self._registration, self._record, self.lease, TTL_S)
        else:
            self.lease = self.registry._register(self._registration, self._record)

    def settle(self) -> None:
        self.run_callbacks()
        self.renew()

    def watch(self, start: int) -> Iterator[Any]:
        self._next_event()  # also between the read and the watch
        starts, store = self.etcd.starts, self.etcd.store
        yield _response(store, created=True)
        while not self._stopped:
            if self.etcd.starts != starts or self.is_broken:
                self.is_broken = False
                raise BackendUnavailable("the connection broke")
            events = [_event(*change) for change in store.history if change[0] >= start]
            if start < store.oldest:
                yield _response(store, canceled=True, compact_revision=store.oldest)
                events = []
            start = start if start < store.oldest else max(start, store.revision + 1)
            yield _response(store, events=events)  # no events: a progress notification
            self._next_event()

    def _next_event(self) -> None:
        if self._order:
            EVENTS[self._order.popleft()](self)
        else:
            self._stopped = True

    def run_callbacks(self) -> None:
        while self._callbacks:
            callback, args = self._callbacks.popleft()
            callback(*args)

    # The methods of an event loop and an Event that the registry uses.

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        self._callbacks.append((callback, args))

    def is_set(self) -> bool:
        return self._stopped

    def wait(self, _timeout_s: float) -> bool:
        return self._stopped


def _event(revision: int, key: str, value: bytes | None) -> Any:
    kv = SimpleNamespace(key=key.encode(), value=value, mod_revision=revision)
    return SimpleNamespace(kv=kv, type=int(value is None))


def _response(store: Store, **facts: Any) -> Any:
    plain = {"created": False, "canceled": False, "compact_revision": 0, "cancel_reason": "", "events": []}
    return SimpleNamespace(**{**plain, **facts}, header=SimpleNamespace(revision=store.revision))


def _lose_latest(process: Process) -> None:
    """etcd loses power before the latest change is on its disk; leases survive."""
    store = process.etcd.store
    records: dict[str, tuple[bytes, int]] = {}
    for _, key, value in store.history[:-1]:
        if value is None:
            records.pop(key)
        else:
            lease = TWIN if load_record(value).epoch == "twin" else store.records.get(key, (value, process.lease))[1]
            records[key] = value, lease
    revision = max(1, store.revision - 1)
    process.etcd.restart(Store(revision, 0, store.leases, records, store.history[:-1]))


def _compact(process: Process) -> None:
    """etcd compacts a change before the watch has received it."""
    process.etcd.store.put(OTHER, dump_record(record("other", "3")), 52)
    process.etcd.store.oldest = process.etcd.store.revision + 1


EVENTS: Final[dict[str, Callable[[Process], None]]] = {
    "callbacks": Process.run_callbacks,
    "renewal": Process.renew,
    "another joins": lambda process: process.etcd.store.put(OTHER, dump_record(record("other", "1")), 50),
    "it comes back": lambda process: process.etcd.store.put(OTHER, dump_record(record("other", "2")), 51),
    "it leaves": lambda process: process.etcd.store.delete(OTHER),
    "ours is deleted": lambda process: process.etcd.store.delete(OURS),
    "our lease ends": lambda process: process.etcd.store.end(process.lease),
    "a twin registers": lambda process: process.etcd.store.put(OURS, dump_record(record("ours", "twin")), TWIN),
    "the twin leaves": lambda process: process.etcd.store.end(TWIN),
    "etcd loses all": lambda process: process.etcd.restart(Store()),
    "etcd loses the latest": _lose_latest,
    "compaction": _compact,
    "the connection breaks": lambda process: setattr(process, "is_broken", True),
    "settle": Process.settle,
}


@pytest.fixture
def without_grpc(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[Process], None]:
    caplog.set_level(logging.CRITICAL, "components")
    running: list[Process] = []

    @contextmanager
    def client(*_: Any) -> Iterator[Etcd]:
        yield running[-1].etcd

    class WatchStub:
        def __init__(self, _channel: Any) -> None:
            pass

        def Watch(self, requests: Iterator[Any], **_: Any) -> Any:
            return Watch(running[-1].watch(next(requests).create_request.start_revision))

    monkeypatch.setattr(registry_module, "etcd_client", client)
    monkeypatch.setattr(etcdrpc, "WatchStub", WatchStub)
    return running.append


class Watch:
    def __init__(self, responses: Iterator[Any]) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[Any]:
        return self._responses

    def cancel(self) -> None:
        pass


def _assert_consistent(seen: list[tuple[InstanceRecord | None, InstanceRecord | None]], order: tuple[str, ...]) -> None:
    """Each change must begin with the state after the last one."""
    known: dict[str, InstanceRecord] = {}
    for was, now in seen:
        of = now or was
        assert of is not None, order
        assert known.get(of.instance_id) == was, order
        assert was != now, order
        known.pop(of.instance_id, None)
        if now is not None:
            known[of.instance_id] = now


async def test_the_book_follows_etcd_and_our_record_is_there_within_the_lifetime_of_a_lease(
    without_grpc: Callable[[Process], None],
) -> None:
    for order in permutations([name for name in EVENTS if name != "settle"], 3):
        process = Process(order)
        without_grpc(process)
        process.run()
        in_etcd = {key: load_record(value) for key, (value, _) in process.etcd.store.records.items()}
        book = process.registry.book
        assert OURS in in_etcd, order
        assert process.etcd.needless == 0 or process.etcd.starts, order
        assert {key: book.at(key) for key in (OURS, OTHER) if book.at(key)} == in_etcd, order
        _assert_consistent(process.seen, order)
