"""Members of etcd that end, lose their leader or hang: a registration stays, and the mirror uses another member."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Final
from urllib.parse import urlsplit

import pytest

from components.discovery.registry import Registration, join_registry
from components.wire.instances import dump_record
from tests.components.discovery.fake_etcd import Member, Store
from tests.components.discovery.records import record
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

TTL_S: Final = 2
NOTICED_WITHIN_S: Final = 50.0  # the death of a host; gRPC's defaults take over a minute
RECORDS: Final = 3_600  # of 1.3 kB each: more than the 4 MiB that gRPC accepts by default


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def members(store: Store) -> Iterator[list[Member]]:
    """Start two members of one cluster."""
    with ExitStack() as stack:
        started = [Member(store) for _ in range(2)]
        for member in started:
            stack.callback(member.stop)
        yield started


def url_of(*members: Member) -> str:
    return ",".join(member.url for member in members)


@pytest.mark.parametrize("ended", [0, 1])
async def test_a_lease_is_kept_at_another_member_when_one_ends(store: Store, members: list[Member], ended: int) -> None:
    """Renewals went to the member that had granted the lease until it expired: each process registered again."""
    registration = Registration("one")
    async with (
        join_registry(url_of(*members), "ns", TTL_S) as registry,
        registry.advertise(registration, lambda epoch: record("one", epoch)),
    ):
        epoch = registration.epoch
        await asyncio.to_thread(members[ended].stop)
        other = members[1 - ended]
        before = other.renewals
        await until(lambda: other.renewals >= before + 3)  # a lease's lifetime
        assert registration.epoch == epoch
        assert len(store.leases) == 1, "another lease was granted"
        assert store.is_alive(1)


@pytest.mark.parametrize("minority", [0, 1])
async def test_a_member_without_a_leader_is_passed_over(members: list[Member], minority: int) -> None:
    """It answers `status`, so it was always chosen, and the healthy one never."""
    members[minority].has_leader = False
    async with asyncio.timeout(PATIENCE_S), join_registry(url_of(*members), "ns", TTL_S):
        pass


async def test_a_mirror_leaves_a_member_that_loses_its_leader(members: list[Member]) -> None:
    """Its watch stayed open, but delivered no changes."""
    async with join_registry(url_of(*members), "ns", TTL_S):
        await until(lambda: any(member.watches for member in members))
        followed, other = sorted(members, key=lambda member: -member.watches)
        followed.has_leader = False
        await until(lambda: other.watches)


async def test_an_etcd_that_answers_no_ranges_is_asked_less_and_less(members: list[Member]) -> None:
    """It answered `status`, which reset the back-off: each process made five connections and five reads a second."""
    member = members[0]
    member.has_leader = False

    async def join() -> None:
        async with join_registry(member.url, "ns", TTL_S):
            raise AssertionError("there is nothing to join")

    joining = asyncio.create_task(join())
    await asyncio.sleep(4)
    assert 0 < member.ranges <= 10
    member.has_leader = True
    with pytest.raises(AssertionError, match="nothing to join"):
        await joining


async def test_more_records_than_one_message_holds_are_read(store: Store, members: list[Member]) -> None:
    """With 3,300 records no process could start: each reported an unreachable etcd."""
    for i in range(RECORDS):
        there = record(f"{i:08x}", host="h" * 1_200)
        store.records[f"ns/instances/decode/{i:08x}".encode()] = dump_record(there)
    assert sum(map(len, store.records.values())) > 4 << 20
    async with asyncio.timeout(PATIENCE_S), join_registry(members[0].url, "ns", TTL_S) as registry:
        assert len(registry.book.of_role("decode")) == RECORDS


class SilentProxy:
    """Forwards TCP in threads. Once `is_dead`, it drops bytes, like a host without power."""

    def __init__(self, url: str) -> None:
        self.is_dead = False
        self._target = ("127.0.0.1", urlsplit(url).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._spawn(self._accept)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                self._spawn(self._copy, near, far)
                self._spawn(self._copy, far, near)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_dead:
                    target.sendall(data)

    def _spawn(self, work: object, *args: object) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()


async def test_a_dead_host_is_noticed_by_an_idle_watch_long_before_a_minute_is_over(members: list[Member]) -> None:
    """It took 65 to 105 s: gRPC waits a minute for the answer to a ping, and does not ping idle connections."""
    proxy = SilentProxy(members[0].url)
    try:
        async with join_registry(proxy.url, "ns", TTL_S) as registry:
            assert registry.connected
            proxy.is_dead = True
            async with asyncio.timeout(NOTICED_WITHIN_S):
                while registry.connected:
                    await asyncio.sleep(0.1)
    finally:
        proxy.close()
