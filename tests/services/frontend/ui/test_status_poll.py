"""Which instances are asked for a status, and what is made of answers."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from components.discovery.book import InstanceBook
from components.errors import NobodyListens
from components.messaging.heartbeat_query import HeartbeatAnswers
from components.wire.codec import Struct
from components.wire.load import AskLoad, Load, LoadSample
from components.wire.status import Status
from services.frontend.ui.load_history import LoadHistory
from services.frontend.ui.mesh_load import MeshLoad
from services.frontend.ui.mesh_view import Reports
from services.frontend.ui.status_poll import AT_ONCE, MAX_ASKED_PER_S, StatusPoll
from tests.components.discovery.records import record

pytestmark = pytest.mark.anyio


class FakeBus:
    def __init__(self) -> None:
        self.is_connected = True
        self.asked: Counter[str] = Counter()
        self.deaf: set[str] = set()
        self.samples: list[LoadSample] = []
        self.at_once = self.most_at_once = 0

    async def call(self, subject: str, request: Struct, *_: Any, timeout_s: float) -> Struct:
        name = subject.split(".")[2]
        self.asked[name] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if name in self.deaf:
            raise NobodyListens("nobody")
        if isinstance(request, AskLoad):
            return Load(samples=[one for one in self.samples if one.unix_s > request.after_unix_s])
        return Status(instance_id=name, role="decode")


class FakeRollCall:
    async def answers(self) -> HeartbeatAnswers:
        return HeartbeatAnswers({})


def polled(count: int) -> tuple[StatusPoll, FakeBus, InstanceBook, Reports]:
    bus, book, reports = FakeBus(), InstanceBook(), Reports()
    for i in range(count):
        book.put(f"d{i:03}", record(f"d{i:03}"))
    return (
        StatusPoll("me", bus, book, FakeRollCall(), reports=reports, load=MeshLoad(LoadHistory())),
        bus,
        book,
        reports,
    )


async def test_each_other_frontend_is_asked_for_its_new_samples() -> None:
    poll, bus, book, _ = polled(0)
    for name in ("me", "f1"):
        book.put(name, record(name, role="frontend"))
    bus.samples = [LoadSample(unix_s=2.0, seconds=2.0, generated_tokens=8)]
    await poll.once()
    assert bus.asked == {"me": 1, "f1": 2}  # f1 for both, me for a status alone
    assert [sample["out"] for sample in poll._load.samples()] == [4.0]
    bus.samples.append(LoadSample(unix_s=4.0, seconds=2.0, generated_tokens=6))
    await poll.once()
    assert [sample["out"] for sample in poll._load.samples()] == [4.0, 3.0]


async def test_in_a_large_mesh_all_get_their_turn_a_few_at_a_time() -> None:
    poll, bus, _, reports = polled(4 * MAX_ASKED_PER_S)
    await poll.once()
    assert bus.asked.total() == MAX_ASKED_PER_S
    assert bus.most_at_once <= AT_ONCE
    for _ in range(3):
        await poll.once()
    assert set(bus.asked.values()) == {1}
    assert len(bus.asked) == len(reports.statuses) == 4 * MAX_ASKED_PER_S


async def test_an_instance_that_does_not_answer_is_counted_until_it_does_or_is_gone() -> None:
    poll, bus, book, reports = polled(2)
    bus.deaf.add("d001")
    await poll.once()
    await poll.once()
    assert reports.unanswered == {"d001": 2}
    bus.deaf.clear()
    await poll.once()
    assert reports.unanswered == {}
    bus.deaf.add("d000")
    await poll.once()
    book.drop("d000")
    await poll.once()
    assert (reports.unanswered, list(reports.statuses)) == ({}, ["d001"])


async def test_no_status_is_requested_while_nats_is_away() -> None:
    poll, bus, _, reports = polled(2)
    bus.is_connected = False
    await poll.once()
    assert (bus.asked.total(), reports.prefills) == (0, None)
