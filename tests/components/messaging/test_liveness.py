import asyncio

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from components.aio import background
from components.discovery.book import InstanceBook
from components.errors import DeadlineExceeded, MeshError
from components.messaging.connection import connect_bus
from components.messaging.fan_out import MAX_INTERVAL_S, MIN_INTERVAL_S
from components.messaging.fleet import show_instances
from components.messaging.heartbeat_sender import HeartbeatSender, heartbeat_of
from components.messaging.liveness import (
    EVERY_S,
    HEARTBEAT_TOLERANCE_S,
    HUNG_AFTER_S,
    SILENT_AFTER_S,
    STALLED_AFTER_S,
    Liveness,
    watch_heartbeats,
)
from components.routing.policy import PromptLoad
from components.wire.codec import PROTOCOL, UNNAMED
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from components.wire.step_stats import StepStats
from tests.components.discovery.records import record
from tests.faults.virtual_loop import run_virtually
from tests.waiting import until

IDLE = PromptLoad(0, 0.0)


class Watched:
    """Two decode instances under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.book = InstanceBook()
        self.book.put("a", record("a", "1", model="m"))
        self.liveness = Liveness(self.book, "decode", lambda: self.now)
        self.book.put("b", record("b", "1", model="m"))
        self.lost: list[tuple[str, str, str]] = []
        self.liveness.on_lost(lambda r, why: self.lost.append((r.instance_id, r.epoch, why)))

    def beat(
        self, name: str = "a", step: int = 0, epoch: str = "1", *, busy: bool = False, drain: bool = False
    ) -> None:
        self.liveness.record_heartbeat(Heartbeat(instance_id=name, epoch=epoch, step=step, busy=busy, draining=drain))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.liveness.check()

    @property
    def usable(self) -> list[str]:
        return [r.instance_id for r in self.liveness.usable()]


def test_an_instance_is_usable_from_its_registration_on() -> None:
    watched = Watched()
    assert watched.usable == ["a", "b"]
    assert [r.instance_id for r in watched.liveness.usable("m")] == ["a", "b"]
    assert watched.liveness.usable("other") == []
    assert watched.liveness.last_heartbeat("a") is None


def test_an_instance_of_another_protocol_is_not_used_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.book.put("c", record("c", "1", model="m", protocol=UNNAMED, oldest_protocol=UNNAMED))
    watched.book.put("d", record("d", "1", model="m", protocol=PROTOCOL + 1, oldest_protocol=PROTOCOL))
    watched.book.put("e", record("e", "1", model="m", protocol=PROTOCOL + 1, oldest_protocol=PROTOCOL + 1))
    for name in "cde":
        watched.beat(name)
    watched.book.put("c", record("c", "2", model="m", protocol=UNNAMED, oldest_protocol=UNNAMED))
    assert watched.usable == ["a", "b", "d"]
    assert [r.__dict__["instance"] for r in caplog.records if "another protocol" in r.message] == ["c", "e"]
    watched.book.put("c", record("c", "3", model="m"))
    assert watched.usable == ["a", "b", "c", "d"]


def test_of_an_adapter_those_instances_are_usable_that_have_it() -> None:
    watched = Watched()
    watched.book.put("c", record("c", model="m", adapters={"legal": "w1"}))
    assert [r.instance_id for r in watched.liveness.usable("m", "legal")] == ["c"]
    assert watched.liveness.usable("m", "medical") == []
    assert [r.instance_id for r in watched.liveness.usable("m")] == ["a", "b", "c"]


def test_a_silent_instance_is_lost_once_and_comes_back_with_its_next_beat() -> None:
    watched = Watched()
    watched.after(SILENT_AFTER_S)
    assert watched.usable == ["a", "b"]
    watched.beat("b")
    watched.after(0.1)
    watched.after(0.1)
    assert [(name, why.split(" for")[0]) for name, _, why in watched.lost] == [("a", "silent")]
    assert watched.usable == ["b"]
    watched.beat("a")
    assert watched.usable == ["a", "b"]
    watched.after(SILENT_AFTER_S + 1)
    assert [name for name, _, _ in watched.lost] == ["a", "a", "b"]


def test_the_end_of_a_process_is_reported_also_if_it_was_lost_before() -> None:
    """A frontend kept its data of a decode instance that had been silent first."""
    watched = Watched()
    ended: list[tuple[str, str]] = []
    watched.liveness.on_ended(lambda r: ended.append((r.instance_id, r.epoch)))
    watched.after(SILENT_AFTER_S + 0.1)
    assert ended == [], "they may be back"
    watched.book.put("a", record("a", "1", model="m", max_context=7))
    assert ended == [], "a new record of the same process"
    watched.book.put("a", record("a", "2", model="m"))
    watched.book.remove("b")
    watched.book.remove("a")
    assert ended == [("a", "1"), ("b", "1"), ("a", "2")]


def test_losses_are_counted_by_reason_and_instances_by_what_may_be_done_with_them() -> None:
    watched = Watched()
    registry = CollectorRegistry()
    show_instances(registry, watched.liveness)

    def shown(name: str, label: str) -> dict[str, float]:
        samples = (s for family in registry.collect() for s in family.samples)
        return {s.labels[label]: s.value for s in samples if s.name == name and s.value}

    watched.book.put("c", record("c", "1", model="m", protocol=UNNAMED, oldest_protocol=UNNAMED))
    watched.beat("a", drain=True)
    assert shown("kvmesh_instances", "state") == {"draining": 1, "usable": 1, "other_protocol": 1}
    assert shown("kvmesh_instances_lost_total", "reason") == {}
    watched.book.remove("a")  # drained
    watched.book.remove("c")
    watched.after(STALLED_AFTER_S + 0.1)
    assert shown("kvmesh_instances", "state") == {"stalled": 1}
    watched.after(SILENT_AFTER_S)
    assert shown("kvmesh_instances", "state") == {"lost": 1}
    watched.book.put("b", record("b", "2", model="m"))
    watched.book.put("b", record("b", "3", model="m"))
    expected = {"drained": 1, "left": 1, "silent": 1, "replaced": 1}
    assert shown("kvmesh_instances_lost_total", "reason") == expected, "b was lost already when it came back as 2"


def test_the_age_of_a_heartbeat_grows_until_the_next() -> None:
    watched = Watched()
    watched.now += 3
    watched.beat("b")
    watched.now += 1
    assert watched.liveness.ages_s() == {"a": 4, "b": 1}


def test_a_hung_engine_is_lost_until_it_moves() -> None:
    watched = Watched()
    for _ in range(int(HUNG_AFTER_S)):
        watched.beat("a", step=7, busy=True)
        watched.beat("b", step=7)
        watched.after(1)
    assert not watched.lost
    watched.beat("a", step=7, busy=True)
    watched.beat("b", step=7)
    watched.after(1.5)
    assert [(name, why.split(" for")[0]) for name, _, why in watched.lost] == [("a", "its engine has made no step")]
    watched.beat("a", step=7, busy=True)
    assert watched.usable == ["b"], "a beat alone does not bring it back"
    watched.beat("a", step=8, busy=True)
    assert watched.usable == ["a", "b"]


def test_an_idle_engine_makes_no_steps_and_may_then_take_its_time() -> None:
    watched = Watched()
    for _ in range(100):
        watched.beat("a", step=7)
        watched.beat("b")
        watched.after(1)
    watched.beat("a", step=7, busy=True)
    watched.after(1)
    assert not watched.lost


def test_a_draining_instance_takes_no_new_work_and_is_not_lost() -> None:
    watched = Watched()
    watched.beat("a", drain=True)
    assert watched.usable == ["b"]
    assert not watched.lost
    last = watched.liveness.last_heartbeat("a")
    assert last is not None
    assert last.draining


def test_leaving_etcd_and_a_new_epoch_are_losses_of_the_old_one() -> None:
    watched = Watched()
    watched.beat("a", drain=True)
    watched.book.put("a", record("a", "2"))
    watched.book.remove("b")
    assert watched.lost == [("a", "1", "registered anew"), ("b", "1", "left etcd")]
    assert watched.usable == ["a"], "the new epoch starts afresh, its draining forgotten"
    watched.beat("a", epoch="1", drain=True)
    assert watched.usable == ["a"], "a beat of the old epoch says nothing"


def test_an_instance_lost_to_silence_is_not_lost_again_when_it_leaves_etcd() -> None:
    watched = Watched()
    watched.after(SILENT_AFTER_S + 1)
    watched.lost.clear()
    watched.book.remove("a")
    watched.book.remove("b")
    assert not watched.lost
    assert not watched.liveness._health


def test_unknown_instances_and_other_roles_are_ignored() -> None:
    watched = Watched()
    watched.book.put("p", record("p", role="prefill"))
    watched.beat("p")
    watched.beat("unknown")
    assert watched.usable == ["a", "b"]


def test_a_process_that_was_held_up_itself_starts_the_count_afresh() -> None:
    watched = Watched()
    watched.now += 60
    watched.liveness.reset_times()
    watched.liveness.check()
    assert not watched.lost
    watched.after(SILENT_AFTER_S + 0.1)
    assert len(watched.lost) == 2


def test_a_heartbeat_reports_what_the_engine_measured() -> None:
    stats = StepStats(step=5, num_waiting=2, num_reserved=1, free_pages=3, total_pages=9)
    beat = heartbeat_of("i", "e", stats, PromptLoad(70, 2.5), draining=True)
    assert beat == Heartbeat(
        instance_id="i",
        epoch="e",
        step=5,
        busy=True,
        draining=True,
        num_waiting=2,
        num_reserved=1,
        free_pages=3,
        total_pages=9,
        queued_tokens=70,
        prompt_tokens_per_s=2.5,
    )
    assert heartbeat_of("i", "e", StepStats(), IDLE, draining=False, is_stepping=True).busy, "its first step may hang"
    assert not heartbeat_of("i", "e", msgspec.structs.replace(stats, num_waiting=0), IDLE, draining=False).busy


def test_an_instances_report_of_its_prompts_ages() -> None:
    watched = Watched()
    assert watched.liveness.prompt_load("a") == watched.liveness.prompt_load("unknown") == IDLE
    watched.liveness.record_heartbeat(heartbeat_of("a", "1", StepStats(), PromptLoad(70, 2.5), draining=False))
    watched.after(1.5)
    assert watched.liveness.prompt_load("a") == PromptLoad(70, 2.5, age_s=1.5)


@pytest.mark.mesh
@pytest.mark.anyio
async def test_a_worker_that_stops_beating_is_lost_over_nats(nats_url: str, namespace: str) -> None:
    book = InstanceBook()
    mine = record("one", "1", subject=f"{namespace}.decode.one")
    book.put("k", mine)
    lost: list[InstanceRecord] = []
    async with connect_bus(nats_url, "test") as bus, watch_heartbeats(bus, namespace, "decode", book) as liveness:
        liveness.on_lost(lambda r, _: lost.append(r))
        beat = heartbeat_of("one", "1", StepStats(), IDLE, draining=False)
        async with HeartbeatSender(bus, mine.subject, lambda: beat, lambda: MIN_INTERVAL_S).running():
            await bus.publish_bytes(f"{mine.subject}.heartbeat", b"garbage")
            await until(lambda: liveness.last_heartbeat("one") is not None)
            assert liveness.usable() == [mine]
        await until(lambda: lost)
    assert lost == [mine]


class BeatCounter:
    """Counts published messages; the first raises `error`."""

    def __init__(self, error: MeshError | None = None) -> None:
        self.beats = 0
        self._error = error

    async def publish(self, subject: str, message: Heartbeat) -> None:
        assert (subject, message.instance_id) == ("ns.decode.one.heartbeat", "one")
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.beats += 1


def beating(counter: BeatCounter, rest_s: float) -> HeartbeatSender:
    beat = heartbeat_of("one", "1", StepStats(), IDLE, draining=False)
    return HeartbeatSender(counter, "ns.decode.one", lambda: beat, lambda: rest_s)


async def beats_of(rest_s: float, step_s: float, *, early: bool = False) -> int:
    """That are sent in 9.9 s by a worker that steps each `step_s`, or only says something before its step ends."""
    counter = BeatCounter()
    heart = beating(counter, rest_s)
    async with background(heart.run(), "heartbeat"):
        until = asyncio.get_running_loop().time() + 9.9
        step = 1
        while (left_s := until - asyncio.get_running_loop().time()) > 0:
            heart.stepped(step)
            step += not early
            await asyncio.sleep(min(left_s, step_s))
    return counter.beats


@pytest.mark.parametrize(
    ("rest_s", "step_s", "early", "beats"),
    [
        (0.05, 9.9, False, 20),
        (0.05, 0.01, False, 198),
        (0.05, 0.2, False, 50),
        (0.2, 0.01, False, 50),
        (0.05, 0.01, True, 20),
        (1.4, 0.01, False, 8),
        (1.4, 9.9, False, 8),
    ],
)
def test_a_worker_sends_a_heartbeat_after_each_step_but_not_too_often(
    rest_s: float, step_s: float, early: bool, beats: int
) -> None:
    assert run_virtually(lambda: beats_of(rest_s, step_s, early=early)) == pytest.approx(beats, abs=beats / 10)


def test_a_heartbeat_announces_the_next_one_and_how_long_the_engine_has_been_stalled() -> None:
    async def test() -> None:
        beats: list[Heartbeat] = []

        class Kept:
            async def publish(self, subject: str, message: Heartbeat) -> None:
                beats.append(message)

        busy = heartbeat_of("one", "1", StepStats(step=3, num_running=1), IDLE, draining=False)
        now = [busy]
        heart = HeartbeatSender(Kept(), "ns.decode.one", lambda: now[0], lambda: 1.4)
        async with background(heart.run(), "heartbeat"):
            await asyncio.sleep(3.0)
            now[0] = msgspec.structs.replace(busy, step=4)
            await asyncio.sleep(1.4)
        assert [beat.next_s for beat in beats] == [1.4] * 4
        assert [round(beat.still_s, 1) for beat in beats] == [0.0, 1.4, 2.8, 0.0]

    run_virtually(test)


def test_urgent_changes_are_sent_at_once() -> None:
    async def test() -> None:
        counter = BeatCounter()
        heart = beating(counter, EVERY_S)
        async with background(heart.run(), "heartbeat"):
            for beats in range(1, 5):
                await asyncio.sleep(0.001)
                assert counter.beats == beats
                heart.send_now()

    run_virtually(test)


def test_a_heartbeat_that_cannot_be_sent_does_not_end_the_sender() -> None:
    async def test() -> None:
        counter = BeatCounter(DeadlineExceeded("the connection timed out"))
        async with background(beating(counter, MIN_INTERVAL_S).run(), "heartbeat"):
            await asyncio.sleep(1.2)
        assert counter.beats == 2

    run_virtually(test)


def test_what_is_usual_goes_by_time_not_by_heartbeats() -> None:
    """Ten short steps, each with a heartbeat, take only half a second. A step may still need two seconds, as before."""
    watched = Watched()
    step = 0

    def steps(count: int, each_s: float) -> None:
        nonlocal step
        for _ in range(count):
            for _ in range(max(1, round(each_s / 0.5))):
                watched.beat("a", step=step, busy=True)
                watched.beat("b")
                watched.after(min(each_s, 0.5))
            step += 1

    steps(6, 2.0)
    steps(10, 0.05)
    steps(1, 2.0)
    assert watched.usable == ["a", "b"]
    steps(200, 0.05)
    steps(1, 2.0)
    assert watched.usable == ["b"]


def test_a_stalled_instance_gets_no_new_work_while_another_is_usable() -> None:
    """Its streams do not move yet: it counts as lost much later."""
    watched = Watched()
    for tick in range(1, 4):
        watched.beat("a", step=7, busy=True)
        watched.beat("b", step=tick, busy=True)
        watched.after(0.5)
    watched.after(0.2)
    assert watched.usable == ["b"]
    assert not watched.lost
    watched.beat("a", step=8, busy=True)
    assert watched.usable == ["a", "b"]


def test_who_is_silent_for_a_moment_gets_nothing_new() -> None:
    watched = Watched()
    watched.beat("a")
    watched.after(1.6)
    watched.beat("b")
    watched.after(0.0)
    assert watched.usable == ["b"]
    assert not watched.lost


def test_an_instance_of_a_large_fleet_is_silent_when_two_announced_heartbeats_are_missing() -> None:
    watched = Watched()
    watched.liveness.record_heartbeat(Heartbeat(instance_id="a", epoch="1", step=1, busy=False, next_s=2.0))
    watched.after(2.9)
    assert watched.usable == ["a", "b"], "one that has sent none yet is taken to send as often as the others"
    watched.after(0.2)
    assert not watched.lost
    assert watched.liveness.usable(or_none=True) == []
    watched.after(1.8)
    assert not watched.lost
    watched.after(0.2)
    assert {name for name, _, _ in watched.lost} == {"a", "b"}


@pytest.mark.parametrize("next_s", [1e9, float("inf"), float("nan"), -1.0, 0.0])
def test_no_heartbeat_keeps_its_instance_alive_for_good(next_s: float) -> None:
    watched = Watched()
    watched.liveness.record_heartbeat(Heartbeat(instance_id="a", epoch="1", step=1, busy=False, next_s=next_s))
    watched.after(SILENT_AFTER_S - 0.1)
    assert not watched.lost
    watched.after(2 * MAX_INTERVAL_S + HEARTBEAT_TOLERANCE_S)
    assert {name for name, _, _ in watched.lost} == {"a", "b"}


def test_if_all_are_stalled_all_are_usable() -> None:
    watched = Watched()
    watched.beat("a")
    watched.beat("b")
    watched.after(1.6)
    assert watched.usable == ["a", "b"]
    assert watched.liveness.usable(or_none=True) == []


def test_who_hangs_again_and_again_is_passed_over_each_time() -> None:
    watched = Watched()
    step = 0
    for _ in range(5):
        for _ in range(4):  # two seconds of work
            step += 1
            watched.beat("a", step=step, busy=True)
            watched.beat("b", step=step, busy=True)
            watched.after(0.5)
        assert watched.usable == ["a", "b"]
        usable = []
        for tick in range(10):  # five of none
            watched.beat("a", step=step, busy=True)
            watched.beat("b", step=step + tick + 1, busy=True)
            watched.after(0.5)
            usable.append(watched.usable)
        assert usable[4:] == [["b"]] * 6


def test_a_heartbeat_is_passed_on_if_it_is_of_the_present_epoch() -> None:
    watched = Watched()
    received: list[str] = []
    watched.liveness.on_heartbeat(lambda beat: received.append(beat.instance_id))
    watched.beat("a")
    watched.beat("a", epoch="old")
    watched.beat("nobody")
    assert received == ["a"]


def test_who_is_usable_is_the_same_list_until_something_changes() -> None:
    watched = Watched()
    usable = watched.liveness.usable("m")
    watched.beat("a")
    assert watched.liveness.usable("m") is usable
    watched.beat("a", drain=True)
    assert [r.instance_id for r in watched.liveness.usable("m")] == ["b"]


def test_long_steps_are_no_stall_once_they_are_known() -> None:
    watched = Watched()
    usable = []
    for tick in range(40):
        watched.beat("a", step=tick // 4, busy=True)  # two seconds each
        watched.beat("b", step=tick, busy=True)
        watched.after(0.5)
        usable.append(watched.usable)
    assert ["b"] in usable[:8], "nothing was known of its steps yet"
    assert all(names == ["a", "b"] for names in usable[8:])
    for tick in range(40, 50):
        watched.beat("a", step=10, busy=True)
        watched.beat("b", step=tick, busy=True)
        watched.after(0.5)
    assert watched.usable == ["b"], "it has been stalled for more than twice as long"
