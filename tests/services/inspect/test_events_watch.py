"""How changes in etcd and heartbeats become lines of `inspect events`."""

import json

from msgspec.structs import replace

from components.wire.heartbeat import Heartbeat
from services.inspect.events import Event, Watch
from tests.components.discovery.records import record


class Watched:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.watch = Watch(self.events.append, lambda: 7.5)

    def take(self) -> list[tuple[str, str, str]]:
        taken = [(e.source, e.what, e.instance) for e in self.events]
        self.events.clear()
        return taken


def beat(**facts: object) -> Heartbeat:
    return replace(Heartbeat(instance_id="d", epoch="e", step=1, busy=False, total_pages=9), **facts)


def test_records_that_come_change_and_go_have_a_line_each() -> None:
    watched = Watched()
    watched.watch.found(record("old"))
    watched.watch.record_changed(None, record("d"))
    watched.watch.record_changed(record("d"), record("d", "e2"))
    watched.watch.record_changed(record("d", "e2"), None)
    assert watched.events[2].facts == "epoch e1 → e2"
    assert watched.take() == [
        ("etcd", "is there", "old"),
        ("etcd", "registered", "d"),
        ("etcd", "changed", "d"),
        ("etcd", "left etcd", "d"),
    ]


def test_a_worker_that_drains_is_told_once_for_each_state() -> None:
    watched = Watched()
    for load in (beat(), beat(num_running=1), beat(draining=True, num_running=1), beat(draining=True, num_running=1)):
        watched.watch.record_heartbeat("decode", load)
    watched.watch.record_heartbeat("decode", beat(draining=True))
    watched.watch.record_heartbeat("decode", beat())
    assert [what for _, what, _ in watched.take()] == ["first heartbeat", "draining", "drained", "accepts work again"]


def test_a_silent_worker_is_lost_and_back_and_one_that_left_etcd_has_no_second_line() -> None:
    watched = Watched()
    watched.watch.record_heartbeat("decode", beat())
    watched.watch.lost(record("d"), "silent for 2.1 s")
    watched.watch.record_heartbeat("decode", beat())
    watched.watch.lost(record("d"), "left etcd")
    assert [what for _, what, _ in watched.take()] == ["first heartbeat", "lost", "is back"]


def test_planners_are_told_when_they_begin_or_cease_to_answer() -> None:
    watched = Watched()
    watched.watch.planners({"x": "ns.planner.x"})
    watched.watch.planners({"x": "ns.planner.x"})
    watched.watch.planners({})
    assert [(what, instance) for _, what, instance in watched.take()] == [("answers", "x"), ("answers no more", "x")]


def test_an_event_is_a_line_for_people_and_an_object_for_programs() -> None:
    event = Event(0.25, "heartbeat", "lost", "decode", "ab12cd34", "silent for 2.1 s")
    assert json.loads(event.json()) == {
        "unix_s": 0.25,
        "source": "heartbeat",
        "what": "lost",
        "role": "decode",
        "instance": "ab12cd34",
        "facts": "silent for 2.1 s",
    }
    assert event.text().plain.endswith(".250  heartbeat  decode     ab12cd34  lost  silent for 2.1 s")
