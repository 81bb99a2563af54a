"""Instances whose records have left etcd: only live ones stay."""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from components.discovery.book import InstanceBook
from components.discovery.registry import Registration
from components.errors import BackendUnavailable
from components.messaging import presence
from components.messaging.presence import keep_present, present_endpoint
from components.wire.instances import AskPresent
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Mesh:
    def __init__(self) -> None:
        self.bus, self.book = FakeBus(), InstanceBook()

    def add(self, name: str) -> Registration:
        registration = Registration(name, "1")
        self.bus.serve(f"ns.decode.{name}", [present_endpoint(registration)])
        self.book.put(name, record(name, "1"))
        return registration

    def die(self, name: str) -> None:
        del self.bus.handlers[f"ns.decode.{name}.present"]

    @property
    def here(self) -> list[str]:
        return [r.instance_id for r in self.book.of_role("decode")]


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setattr(presence, "CALL_INTERVAL_S", 0.05)
    monkeypatch.setattr(presence, "JITTER_PER_INSTANCE_S", 0.001)
    made = Mesh()
    async with keep_present(made.bus, made.book, Random(0)):
        yield made
    assert made.book.on_missing is None


async def test_one_that_answers_stays_and_is_asked_again_until_it_does_not(mesh: Mesh) -> None:
    mesh.add("a")
    mesh.book.remove("a")
    await until(lambda: len(mesh.bus.of(AskPresent)) > 1)
    assert mesh.here == ["a"]
    mesh.die("a")
    await until(lambda: mesh.here == [])


async def test_one_that_is_dead_goes_at_once(mesh: Mesh) -> None:
    mesh.add("a")
    mesh.die("a")
    mesh.book.remove("a")
    await until(lambda: mesh.here == [])
    assert len(mesh.bus.of(AskPresent)) == 1


async def test_one_that_is_leaving_or_another_process_by_now_goes(mesh: Mesh) -> None:
    mesh.add("a").leaving = True
    mesh.add("b").epoch = "2"
    for name in "ab":
        mesh.book.remove(name)
    await until(lambda: mesh.here == [])
    assert len(mesh.bus.of(AskPresent)) == 2


async def test_one_that_etcd_has_again_is_asked_no_more(mesh: Mesh) -> None:
    mesh.add("a")
    mesh.book.remove("a")
    await until(lambda: mesh.bus.of(AskPresent))
    mesh.book.put("a", record("a", "1"))
    asked = len(mesh.bus.of(AskPresent))
    await asyncio.sleep(0.2)
    assert len(mesh.bus.of(AskPresent)) == asked
    assert mesh.here == ["a"]


async def test_silence_and_an_outage_of_nats_prove_nothing(mesh: Mesh) -> None:
    mesh.add("a")
    mesh.bus.broken = BackendUnavailable("away")
    mesh.book.remove("a")
    await asyncio.sleep(0.1)
    mesh.bus.broken = None
    assert mesh.here == ["a"]


async def test_just_after_a_reconnect_no_instance_is_given_up(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of NATS drops every connection: the first processes to reconnect counted the others as lost."""
    steady = [0.1]
    monkeypatch.setattr(mesh.bus, "since_reconnect_s", lambda: steady[0])
    mesh.add("a")
    mesh.die("a")
    mesh.book.remove("a")
    await asyncio.sleep(0.1)
    assert mesh.here == ["a"]
    steady[0] = 60.0
    await until(lambda: mesh.here == [])


async def test_when_etcd_loses_everybody_the_questions_are_spread_and_bounded(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "JITTER_PER_INSTANCE_S", 0.002)
    names = [f"d{number}" for number in range(300)]
    for name in names:
        mesh.add(name)
    mesh.book.replace_all({})
    await asyncio.sleep(0)
    assert len(mesh.bus.of(AskPresent)) <= presence.MAX_CONCURRENT_CALLS
    assert len(mesh.here) == 300
    mesh.book.replace_all({name: record(name, "1") for name in names[:250]})
    await asyncio.sleep(0.7)
    assert mesh.book.missing_in_etcd == set(names[250:])
    assert len(mesh.here) == 300
