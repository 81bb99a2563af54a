import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from components.backoff import Backoff
from components.discovery.etcd import etcd_client, etcd_errors
from components.discovery.registry import PAGE, Registration, Registry, join_registry
from components.errors import BackendUnavailable, StaleInstance
from components.process import stop_signals
from components.urls import without_password
from components.wire.instances import InstanceRecord, dump_record
from services.local.child_process import kill
from services.local.servers import ETCD, Server, running
from tests.components.discovery.records import record
from tests.waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]
TTL_S: Final = 10.0
SHORT_TTL_S: Final = 2.0  # a loss is noticed after a third of it


def epochs(registry: Registry) -> list[tuple[str, str]]:
    return [(r.instance_id, r.epoch) for r in registry.book.of_role("decode")]


def write(url: str, key: str, value: str) -> None:
    with etcd_client(url) as client:
        client.put(key, value)


def revoke(url: str, key: str) -> None:
    """Revoke the lease of a record."""
    with etcd_client(url) as client:
        _, about = client.get(key)
        client.revoke_lease(about.lease_id)


def compact(url: str) -> int:
    """Compact all revisions before the newest, and return that."""
    with etcd_client(url) as client:
        revision = client.get_prefix_response("/").header.revision
        client.compact(revision)
        return int(revision)


async def test_a_process_that_is_stopped_while_it_registers_leaves_no_record(etcd_url: str, namespace: str) -> None:
    def make(epoch: str) -> InstanceRecord:
        os.kill(os.getpid(), signal.SIGTERM)
        return record("one", epoch)

    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        async with stop_signals(), registry.advertise(Registration("one"), make):
            raise AssertionError("it serves")
        with etcd_client(etcd_url) as client:
            assert not list(client.get_prefix(f"{namespace}/"))


async def test_others_see_a_join_and_a_leave(etcd_url: str, namespace: str) -> None:
    ttl_s = 1000.0  # the lease does not expire
    async with join_registry(etcd_url, namespace, ttl_s) as mine, join_registry(etcd_url, namespace, ttl_s) as other:
        registration = Registration("one")
        async with mine.advertise(registration, lambda epoch: record("one", epoch)):
            assert registration.is_leased()
            await until(lambda: epochs(other) == [("one", registration.epoch)], "the other sees it")
        await until(lambda: not epochs(other), "the other sees it leave")


async def test_a_later_process_sees_all_records(etcd_url: str, namespace: str) -> None:
    async with (
        join_registry(etcd_url, namespace, TTL_S) as mine,
        mine.advertise(Registration("one"), lambda epoch: record("one", epoch)),
        join_registry(etcd_url, namespace, TTL_S) as late,
        join_registry(etcd_url, f"{namespace}0", TTL_S) as stranger,
    ):
        assert [name for name, _ in epochs(late)] == ["one"]
        assert not epochs(stranger)


async def test_a_dropped_lease_is_replaced_and_the_instance_keeps_its_epoch(etcd_url: str, namespace: str) -> None:
    """With a new epoch, frontends would move its streams, and prefill would refuse its pages."""
    async with join_registry(etcd_url, namespace, SHORT_TTL_S) as registry:
        changes: list[Any] = []
        registration = Registration("one")
        async with registry.advertise(registration, lambda epoch: record("one", epoch)):
            await until(lambda: epochs(registry), "registered")
            epoch = registration.epoch
            registry.book.subscribe(lambda was, now: changes.append((was, now)))
            await asyncio.to_thread(revoke, etcd_url, f"{namespace}/instances/decode/one")
            await until(lambda: len(changes) >= 2, "it left and came back")
            await until(lambda: epochs(registry) == [("one", epoch)], "with its epoch")
            registration.check_epoch(epoch)
            with pytest.raises(StaleInstance):
                registration.check_epoch("other")
        await until(lambda: not epochs(registry), "it leaves")


async def test_a_record_that_vanishes_under_a_valid_lease_is_written_again(etcd_url: str, namespace: str) -> None:
    """Records that a client of etcd deletes must come back."""
    async with (
        join_registry(etcd_url, namespace, SHORT_TTL_S) as registry,
        registry.advertise(Registration("one"), lambda epoch: record("one", epoch)),
    ):
        await until(lambda: epochs(registry), "registered")
        changes: list[Any] = []
        registry.book.subscribe(lambda was, now: changes.append((was, now)))
        with etcd_client(etcd_url) as client:
            await asyncio.to_thread(client.delete_prefix, f"{namespace}/")
        await until(lambda: len(changes) >= 2, "it left and came back")
        left, came = changes[:2]
        assert left[0] == came[1]


async def test_a_record_has_not_vanished_while_the_mirror_has_not_seen_it_yet(
    etcd_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A normal start warned that the record had vanished: the lease's first renewal overtook the mirror's watch."""
    caplog.set_level(logging.DEBUG, "components")
    async with join_registry(etcd_url, namespace, SHORT_TTL_S) as registry:
        renewals: list[float] = []
        registration = Registration("one")
        monkeypatch.setattr(registration, "renewed", renewals.append)
        changed, loop = registry._changed, asyncio.get_running_loop()
        monkeypatch.setattr(registry, "_changed", lambda *event: loop.call_later(0.3, changed, *event))
        async with registry.advertise(registration, lambda epoch: record("one", epoch)):
            await until(lambda: len(renewals) > 2 and epochs(registry), "registered, renewed twice and seen")
    assert not [message for message in caplog.messages if "vanished" in message]


async def test_an_unreadable_record_counts_as_absent(
    etcd_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no owner, which would write it again."""
    key = f"{namespace}/instances/decode/one"
    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        await asyncio.to_thread(write, etcd_url, key, _json("one"))
        await until(lambda: epochs(registry), "the mirror has it")
        await asyncio.to_thread(write, etcd_url, f"{namespace}/instances/decode/garbage", "{")
        await asyncio.to_thread(write, etcd_url, key, '{"instance_id": "from the future"}')
        await until(lambda: not epochs(registry), "the mirror drops it")
        async with join_registry(etcd_url, namespace, TTL_S) as late:
            assert not epochs(late)
    assert "unreadable instance record" in caplog.text


@pytest.mark.parametrize("key", ["prefill/one", "decode/other"])
async def test_a_record_under_the_key_of_another_instance_counts_as_absent(
    etcd_url: str, namespace: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A record under its own key could name, and so replace, any other instance."""
    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        await asyncio.to_thread(write, etcd_url, f"{namespace}/instances/{key}", _json("one"))
        await asyncio.to_thread(write, etcd_url, f"{namespace}/instances/decode/two", _json("two"))
        await until(lambda: epochs(registry), "the mirror has the other one")
        assert [name for name, _ in epochs(registry)] == ["two"]
        assert len(registry.book) == 1
    assert "it names decode 'one'" in vars(caplog.records[-1])["cause"]


async def test_a_compacted_watch_starts_over_and_misses_nothing(etcd_url: str, namespace: str) -> None:
    """etcd cancels a watch from a compacted revision."""
    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        late = Registry(etcd_url, namespace, TTL_S)
        with etcd_client(etcd_url) as client:
            real = late._read

            def old_read(of: Any) -> Any:
                """Return the records before later writes and the compaction."""
                answer = real(of)
                late._read = real  # type: ignore[method-assign]
                write(etcd_url, f"{namespace}/unwatched", "1")
                write(etcd_url, f"{namespace}/instances/decode/two", _json("two"))
                compact(etcd_url)
                return answer

            late._read = old_read  # type: ignore[method-assign, assignment]
            await asyncio.to_thread(late._follow, client, Backoff())  # returns: the watch was cancelled
            assert not epochs(late)
            following = threading.Thread(target=_quietly, args=(late._follow, client))
            following.start()
            await until(lambda: epochs(late) == [("two", "e1")], "the fresh range finds it")
            write(etcd_url, f"{namespace}/instances/decode/three", _json("three"))
            await until(lambda: len(epochs(late)) == 2, "the watch goes on")
            late.close()
            await asyncio.to_thread(following.join)
        await until(lambda: len(epochs(registry)) == 2, "a watch that was up to date never noticed")


async def test_etcd_may_be_away_at_the_start_and_restart_later(
    tmp_path: Path, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "components")
    async with running(ETCD, tmp_path) as server:
        await _kill(server)
        joined = asyncio.create_task(_join(server.url, namespace))
        await until(lambda: "etcd cannot be reached, trying again" in caplog.messages, "it says so")
        [said] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert f"etcd at {without_password(server.url)} cannot be reached" in vars(said)["reason"]
        assert "for a running `make up`: eval" in vars(said)["reason"]
        assert not joined.done()
        await server.restart()
        context, registry = await joined
        registration = Registration("one")
        async with registry.advertise(registration, lambda epoch: record("one", epoch)):
            await until(lambda: epochs(registry), "registered")
            changes: list[Any] = []
            registry.book.subscribe(lambda was, now: changes.append((was, now)))
            await _kill(server)
            await asyncio.sleep(0.2)
            assert epochs(registry), "a mirror stays as it is while etcd is away"
            assert not changes
            await server.restart()
            await asyncio.to_thread(write, server.url, f"{namespace}/instances/decode/two", _json("two"))
            await until(lambda: ("two", "e1") in epochs(registry), "the mirror follows again")
            await until(lambda: ("one", registration.epoch) in epochs(registry), "the record stands")
        await until(lambda: epochs(registry) == [("two", "e1")], "it leaves")
        await context.__aexit__(None, None, None)
        assert not [t for t in threading.enumerate() if t.name.startswith("etcd-")]


@pytest.mark.parametrize("count", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
async def test_a_prefix_is_read_in_pages_and_whole(etcd_url: str, namespace: str, count: int) -> None:
    """gRPC refuses answers of more than 4 MiB, so the records of a large fleet are read in pages."""
    wanted = [f"i{number:04}" for number in range(count)]

    def fill() -> None:
        with etcd_client(etcd_url) as client:
            for name in wanted:
                client.put(f"{namespace}/instances/decode/{name}", _json(name))

    await asyncio.to_thread(fill)
    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        assert [name for name, _ in epochs(registry)] == wanted


async def test_ten_thousand_large_records_are_read_and_watched(etcd_url: str, namespace: str) -> None:
    """With more than 4 MiB of records, a read in one message failed, and no process could start."""
    names = [f"b{number:05}" for number in range(10_000)]
    large = dump_record(record("b00000", model="m" * 4000))

    def fill() -> None:
        with etcd_client(etcd_url) as client:
            for at in range(0, len(names), 100):
                puts = [
                    client.transactions.put(
                        f"{namespace}/instances/decode/{name}", large.replace(b"b00000", name.encode())
                    )
                    for name in names[at : at + 100]
                ]
                client.transaction(compare=[], success=puts, failure=[])

    await asyncio.to_thread(fill)
    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        assert len(registry.book) == len(names)
        with etcd_client(etcd_url) as client:
            await asyncio.to_thread(client.delete_prefix, f"{namespace}/instances/")
        await until(lambda: not len(registry.book), "one event of 10,000 deletions")


async def _join(url: str, namespace: str) -> tuple[Any, Registry]:
    context = join_registry(url, namespace, TTL_S)
    return context, await context.__aenter__()


async def _kill(server: Server) -> None:
    assert server.process is not None
    await kill(server.process)


def _quietly(follow: Callable[[Any, Backoff], None], client: Any) -> None:
    try:
        with etcd_errors(""):
            follow(client, Backoff())
    except BackendUnavailable:
        pass  # closed


def _json(instance_id: str) -> str:
    return dump_record(record(instance_id)).decode()


async def test_each_renewal_of_the_lease_is_a_contact_with_etcd(etcd_url: str, namespace: str) -> None:
    async with (
        join_registry(etcd_url, namespace, SHORT_TTL_S) as mine,
        mine.advertise(Registration("one"), lambda epoch: record("one", epoch)),
    ):
        mine._contacted_s -= 1000
        assert mine.contact_age_s() > 999
        await until(lambda: mine.contact_age_s() < 500, "a renewal")
