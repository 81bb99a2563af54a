import asyncio
from enum import StrEnum, auto

import pytest

from components.lifecycle import Lifecycle
from components.telemetry.figures import MAX_ROOMS, Batch, Figures, Queue, queues_of
from components.telemetry.links import MAX_LINKS, Links
from components.telemetry.recent import EVERY_S, RECENT_S, LoopProbe, RecentSum
from components.wire.codec import pack, unpack
from components.wire.status import PageStatus, RoomStatus, Status


class Place(StrEnum):
    QUEUE = auto()
    BATCH = auto()
    GONE = auto()


NEXT = {Place.QUEUE: {Place.BATCH}, Place.BATCH: {Place.GONE}}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_queues_age_is_that_of_the_oldest_in_this_state(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    first = Lifecycle("first", NEXT, Place.QUEUE)
    clock.now_s += 10
    second = Lifecycle("second", NEXT, Place.QUEUE)
    clock.now_s += 5
    assert queues_of([first, second], list(NEXT)) == {"queue": Queue(2, 15), "batch": Queue(0, 0)}
    first.advance(Place.BATCH)
    clock.now_s += 1
    assert queues_of([first, second], list(NEXT)) == {"queue": Queue(1, 6), "batch": Queue(1, 1)}
    first.advance(Place.GONE)
    assert queues_of([first], list(NEXT)) == {"queue": Queue(), "batch": Queue()}


def test_a_status_asks_every_source_when_it_is_made() -> None:
    figures = Figures("decode", "d1", model="m", layout="l", kv_transfer="nixl/UCX", traces_per_s=5.0)
    figures.queues = lambda: {"waiting": Queue(2, 1.5), "transfer": Queue()}
    figures.pages = lambda: PageStatus(total=10, free=4, cached=3, held=3, exposed=1)
    figures.batch = lambda: Batch(3, 2)
    figures.breakers = lambda: {"p1": "open"}
    figures.heartbeat_ages_s = lambda: {"p1": 0.25}
    figures.etcd_contact_age_s = lambda: 7.0
    figures.links.transferred("p1", 1000, 0.5)
    status = unpack(pack(figures.status()), Status)
    assert (status.instance_id, status.role, status.model, status.layout) == ("d1", "decode", "m", "l")
    assert status.queues == {"waiting": 2, "transfer": 0}
    assert status.oldest_queued_s == {"waiting": 1.5}
    assert status.pages == PageStatus(total=10, free=4, cached=3, held=3, exposed=1)
    assert (status.running, status.waiting, status.etcd_contact_age_s) == (3, 2, 7.0)
    assert (status.breakers, status.heartbeat_ages_s) == ({"p1": "open"}, {"p1": 0.25})
    [link] = status.links
    assert (link.peer, link.transfers, link.bytes, link.seconds) == ("p1", 1, 1000, 0.5)


def test_a_status_names_the_oldest_rooms_and_counts_all() -> None:
    rooms = [
        RoomStatus(room=str(i), request_id=str(i), state="transfer", age_s=float(i)) for i in range(MAX_ROOMS + 50)
    ]
    figures = Figures("decode", "d1", rooms=lambda: rooms)
    status = figures.status()
    assert status.num_rooms == MAX_ROOMS + 50
    assert [room.age_s for room in status.rooms] == [float(i) for i in range(MAX_ROOMS + 49, 49, -1)]


def test_a_recent_sum_forgets_what_is_older_than_its_window() -> None:
    recent, now_s = RecentSum(), 100.0
    for _ in range(20):
        recent.add(50, now_s)
        now_s += 1.0
    assert recent.per_s(now_s) == pytest.approx(50, rel=0.21)
    assert recent.per_s(now_s + 3 * RECENT_S) == 0.0


def test_links_are_bounded_and_keep_the_peers_that_were_used_last() -> None:
    clock = Clock()
    links = Links(clock)
    links.transferred("first", 5000, 0.1)
    links.failed("first")
    assert [(link.transfers, link.failures, link.bytes_per_s) for link in links.shown()] == [(1, 1, 5000 / RECENT_S)]
    for i in range(MAX_LINKS - 1):
        links.failed(str(i))
    links.failed("first")
    links.failed("one more")
    shown = [link.peer for link in links.shown()]
    assert len(shown) == MAX_LINKS
    assert shown[-2:] == ["first", "one more"]
    assert "0" not in shown


def test_the_probe_keeps_the_worst_lag_of_the_last_seconds_and_a_totals_speed() -> None:
    clock, total = Clock(), 0.0
    seen: list[float] = []
    probe = LoopProbe(lambda: total, clock)
    probe.on_lag = seen.append
    assert (probe.worst_lag_s, probe.per_s) == (0.0, 0.0)
    for lag_s in [0.5, -0.001, *[0.01] * int(RECENT_S / EVERY_S)]:
        clock.now_s += EVERY_S
        total += 10
        probe.note(lag_s)
    assert probe.worst_lag_s == 0.01, "half a second is more than RECENT_S ago"
    assert probe.per_s == pytest.approx(10 / EVERY_S)
    assert seen[:2] == [0.5, 0.0]


def test_the_probe_runs_and_sees_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps while the probe sleeps, as it does when a callback blocks the loop."""
    clock = Clock()
    probe = LoopProbe(clock=clock)

    async def sleep(seconds: float) -> None:
        clock.now_s += seconds + 2.0
        if len(probe._lags) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("components.telemetry.recent.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(probe.run())
    assert probe.worst_lag_s == 2.0
