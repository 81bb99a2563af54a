import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from components.discovery.etcd import etcd_client, etcd_errors, keep_lease
from components.discovery.registry import Registration, Registry, join_registry
from components.errors import BackendUnavailable, StaleInstance
from components.wire.instances import dump_record
from services.local.process import kill
from services.local.servers import ETCD, Server, running
from tests.components.discovery.records import record

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]
TTL_S: Final = 10.0
SHORT_TTL_S: Final = 2.0  # where a loss must be noticed soon: at a third of it


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


def epochs(registry: Registry) -> list[tuple[str, str]]:
    return [(r.instance_id, r.epoch) for r in registry.book.of_role("decode")]


def write(url: str, key: str, value: str) -> None:
    with etcd_client(url) as client:
        client.put(key, value)


def revoke(url: str, key: str) -> None:
    """End the lease of a record, as if it had run out."""
    with etcd_client(url) as client:
        _, about = client.get(key)
        client.revoke_lease(about.lease_id)


def compact(url: str) -> int:
    """Make etcd forget every revision before the newest, and return that."""
    with etcd_client(url) as client:
        revision = client.get_prefix_response("/").header.revision
        client.compact(revision)
        return int(revision)


async def test_others_see_a_join_and_a_leave(etcd_url: str, namespace: str) -> None:
    async with join_registry(etcd_url, namespace, TTL_S) as mine, join_registry(etcd_url, namespace, TTL_S) as other:
        registration = Registration("one")
        async with mine.advertise(registration, lambda epoch: record("one", epoch)):
            assert registration.is_held()
            await until(lambda: epochs(other) == [("one", registration.epoch)], "the other sees it")
        gone = time.monotonic()
        await until(lambda: not epochs(other), "the other sees it leave")
        assert time.monotonic() - gone < TTL_S / 2, "the lease ran out instead of being revoked"


async def test_who_joins_later_sees_who_is_there(etcd_url: str, namespace: str) -> None:
    async with (
        join_registry(etcd_url, namespace, TTL_S) as mine,
        mine.advertise(Registration("one"), lambda epoch: record("one", epoch)),
        join_registry(etcd_url, namespace, TTL_S) as late,
        join_registry(etcd_url, f"{namespace}0", TTL_S) as stranger,
    ):
        assert [name for name, _ in epochs(late)] == ["one"]
        assert not epochs(stranger)


async def test_a_lost_lease_is_told_then_registered_anew_under_another_epoch(etcd_url: str, namespace: str) -> None:
    """Whoever is told may have writes to end: the new record must not stand in etcd before they have."""
    async with join_registry(etcd_url, namespace, SHORT_TTL_S) as registry:
        registration = Registration("one")
        told, behave = asyncio.Event(), asyncio.Event()

        async def lost() -> None:
            assert not registration.is_held()
            told.set()
            await behave.wait()

        registration.on_lost(lost)
        async with registry.advertise(registration, lambda epoch: record("one", epoch)):
            first = registration.epoch
            registration.check_epoch(first)
            await asyncio.to_thread(revoke, etcd_url, f"{namespace}/instances/decode/one")
            await asyncio.wait_for(told.wait(), 5)
            await until(lambda: not epochs(registry), "the mirror sees the loss")
            await asyncio.sleep(0.3)
            assert not epochs(registry)
            with pytest.raises(StaleInstance):
                registration.check_epoch(first)
            behave.set()
            await until(lambda: registration.is_held() and epochs(registry), "it is back")
            assert registration.epoch != first
            assert epochs(registry) == [("one", registration.epoch)]
            with pytest.raises(StaleInstance):
                registration.check_epoch(first)


async def test_a_process_may_leave_while_whoever_was_told_of_a_loss_still_ends_its_writes(
    etcd_url: str, namespace: str
) -> None:
    async with join_registry(etcd_url, namespace, SHORT_TTL_S) as registry:
        registration = Registration("one")
        told = asyncio.Event()

        async def lost() -> None:
            told.set()
            await asyncio.Event().wait()

        registration.on_lost(lost)
        async with registry.advertise(registration, lambda epoch: record("one", epoch)):
            await asyncio.to_thread(revoke, etcd_url, f"{namespace}/instances/decode/one")
            await asyncio.wait_for(told.wait(), 5)
        await until(lambda: not epochs(registry), "gone")


async def test_a_record_that_cannot_be_read_counts_as_gone_and_stops_nobody(
    etcd_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{namespace}/instances/decode/one"
    async with (
        join_registry(etcd_url, namespace, TTL_S) as registry,
        registry.advertise(Registration("one"), lambda epoch: record("one", epoch)),
    ):
        await asyncio.to_thread(write, etcd_url, f"{namespace}/instances/decode/garbage", "{")
        await asyncio.to_thread(write, etcd_url, key, '{"instance_id": "from the future"}')
        await until(lambda: not epochs(registry), "the mirror drops it")
        async with join_registry(etcd_url, namespace, TTL_S) as late:
            assert not epochs(late)
    assert "instance record not understood" in caplog.text


async def test_a_compacted_watch_starts_over_and_misses_nothing(etcd_url: str, namespace: str) -> None:
    """etcd cancels a watch from a compacted revision; nothing would ever come again over it."""
    async with join_registry(etcd_url, namespace, TTL_S) as registry:
        late = Registry(etcd_url, namespace, TTL_S)
        with etcd_client(etcd_url) as client:
            real = client.get_prefix_response

            def old_range(prefix: str) -> Any:
                """The range as it was before others wrote and etcd compacted."""
                answer = real(prefix)
                client.get_prefix_response = real
                write(etcd_url, f"{namespace}/unwatched", "1")
                write(etcd_url, f"{namespace}/instances/decode/two", _json("two"))
                compact(etcd_url)
                return answer

            client.get_prefix_response = old_range
            await asyncio.to_thread(late._follow, client)  # returns: the watch was cancelled
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
        assert f"etcd at {server.url} cannot be reached" in vars(said)["reason"]
        assert "`make up` starts one" in vars(said)["reason"]
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
            assert epochs(registry), "a mirror stands still while etcd is away"
            assert not changes
            await server.restart()
            await asyncio.to_thread(write, server.url, f"{namespace}/instances/decode/two", _json("two"))
            await until(lambda: ("two", "e1") in epochs(registry), "the mirror follows again")
            await until(lambda: ("one", registration.epoch) in epochs(registry), "the record stands")
        await until(lambda: epochs(registry) == [("two", "e1")], "it leaves")
        await context.__aexit__(None, None, None)
        assert not [t for t in threading.enumerate() if t.name.startswith("etcd-")]


class Lease:
    """Answers like etcd's: a TTL each time, or an error."""

    def __init__(self, clock: list[float], answers: list[float | None]) -> None:
        self.clock = clock
        self.answers = answers
        self.asked: list[float] = []

    def refresh(self) -> list[Any]:
        self.asked.append(round(self.clock[0], 3))
        answer = self.answers.pop(0) if self.answers else 0
        if answer is None:
            self.clock[0] += self.timeout
            with etcd_errors("http://e"):
                raise BackendUnavailable("away")
        return [type("Answer", (), {"TTL": answer})()]

    timeout = 3.0  # of one call; the keeper shortens it


async def _refreshed(monkeypatch: pytest.MonkeyPatch, answers: list[float | None], ttl_s: float = 9.0) -> Lease:
    clock = [0.0]
    lease = Lease(clock, answers)

    class Stop:
        def wait(self, seconds: float) -> bool:
            clock[0] += seconds
            return False

    class Client:
        def __setattr__(self, name: str, value: float) -> None:
            assert name == "timeout"
            lease.timeout = value

    monkeypatch.setattr("components.discovery.etcd.time.monotonic", lambda: clock[0])
    keep_lease("http://e", Client(), lease, ttl_s, Stop())
    return lease


async def test_a_lease_is_refreshed_at_a_third_of_what_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = await _refreshed(monkeypatch, [9, 9, 6, 9])
    assert lease.asked == [3, 6, 9, 11, 14]


async def test_a_refresh_that_fails_is_tried_again_sooner_and_never_waits_past_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads etcd may reuse our target pages from that moment on, so we must know by then."""
    with pytest.raises(BackendUnavailable):
        await _refreshed(monkeypatch, [None] * 50)
    assert time.monotonic() == pytest.approx(9.0, abs=0.15)


async def _join(url: str, namespace: str) -> tuple[Any, Registry]:
    context = join_registry(url, namespace, TTL_S)
    return context, await context.__aenter__()


async def _kill(server: Server) -> None:
    assert server.process is not None
    await kill(server.process)


def _quietly(follow: Callable[[Any], None], client: Any) -> None:
    try:
        with etcd_errors(""):
            follow(client)
    except BackendUnavailable:
        pass  # closed


def _json(instance_id: str) -> str:
    return dump_record(record(instance_id)).decode()
