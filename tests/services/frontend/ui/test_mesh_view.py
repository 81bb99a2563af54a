"""Instances and links as the page shows them."""

from typing import Any

import pytest
from msgspec.structs import replace

from components.discovery.book import InstanceBook
from components.messaging.heartbeat_query import HeartbeatAnswers
from components.messaging.liveness import SILENT_AFTER_S, STALLED_AFTER_S, Liveness
from components.wire.codec import UNNAMED
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, RankEndpoint
from components.wire.status import LinkStatus, PageStatus, Status
from services.frontend.ui.mesh_view import WARMING_S, MeshView, Reports, about_mesh
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import endpoint

STARTED_S = 1000.0


def beat(name: str, **facts: Any) -> Heartbeat:
    return Heartbeat(instance_id=name, epoch="e1", step=1, busy=False, **facts)


class Shown:
    def __init__(self, *records: InstanceRecord) -> None:
        self.now_s = 0.0
        self.book = InstanceBook()
        for one in records:
            self.book.put(one.instance_id, one)
        self.decodes = Liveness(self.book, "decode", lambda: self.now_s)
        self.reports = Reports()
        about = about_mesh("ns", "m", "f1")
        self.nats_away_s = 0.0
        self.view = MeshView(
            self.book,
            self.decodes,
            self.reports,
            about,
            lambda: STARTED_S + self.now_s,
            nats_contact_age_s=lambda: self.nats_away_s,
        )

    def state(self, name: str) -> str:
        return str(self.view.snapshot().instances[name]["state"])


def instance(name: str, role: str = "decode", **facts: Any) -> InstanceRecord:
    return record(name, role=role, started_unix_ms=int(STARTED_S * 1000), **facts)


def test_a_picture_without_nats_has_its_age() -> None:
    """The page showed its last figures as live, and all prefill instances as silent."""
    shown = Shown()
    assert shown.view.snapshot().about["nats_away"] == 0
    shown.nats_away_s = 1.0
    assert shown.view.snapshot().about["nats_away"] == 0
    shown.nats_away_s = 6.2
    assert shown.view.snapshot().about["nats_away"] == 6


def test_an_instance_on_several_devices_names_them() -> None:
    whole = endpoint("d1")
    followers = [RankEndpoint(pid=7, device="cuda:1", base_address=0)]
    shown = Shown(
        instance("d1", kv=replace(whole, device="cuda:0", followers=followers)), instance("d2", kv=endpoint("d2"))
    )
    of = shown.view.snapshot().instances
    assert of["d1"]["devices"] == ["cuda:0", "cuda:1"]
    assert "devices" not in of["d2"]


def test_a_decode_instance_warms_up_serves_stalls_is_silent_and_is_back() -> None:
    shown = Shown(instance("d1"), instance("d2"))
    assert shown.state("d1") == "warming"
    shown.decodes.record_heartbeat(beat("d1"))
    assert shown.state("d1") == "up"
    shown.now_s += STALLED_AFTER_S + 0.1
    shown.decodes.record_heartbeat(beat("d2"))
    shown.decodes.check()
    assert shown.state("d1") == "late"
    shown.now_s += SILENT_AFTER_S
    shown.decodes.check()
    assert shown.state("d1") == "silent"
    assert shown.view.snapshot().instances["d1"]["beat_age"] > 0
    shown.decodes.record_heartbeat(beat("d1", draining=True))
    assert shown.state("d1") == "draining"
    shown.decodes.record_heartbeat(beat("d1"))
    assert shown.state("d1") == "up"
    assert "beat_age" not in shown.view.snapshot().instances["d1"]


def test_a_prefill_instance_is_new_then_answers_or_not() -> None:
    shown = Shown(instance("p1", "prefill"))
    assert shown.state("p1") == "warming"
    shown.reports.prefills = HeartbeatAnswers({})
    assert shown.state("p1") == "warming"
    shown.now_s += WARMING_S
    assert shown.state("p1") == "silent"
    shown.reports.prefills = HeartbeatAnswers({"p1": beat("p1", held_pages=3, total_pages=10)})
    assert shown.state("p1") == "up"
    assert shown.view.snapshot().instances["p1"]["held"] == 3
    shown.reports.prefills = HeartbeatAnswers({"p1": beat("p1", draining=True)})
    assert shown.state("p1") == "draining"


def test_others_are_silent_after_two_unanswered_calls() -> None:
    shown = Shown(instance("f1", "frontend", http="http://h:1"), instance("b1", "bootstrap"))
    assert (shown.state("f1"), shown.state("b1")) == ("up", "up")
    shown.reports.unanswered["b1"] = 1
    assert shown.state("b1") == "up"
    shown.reports.unanswered["b1"] = 2
    assert shown.state("b1") == "silent"
    shown.reports.statuses["f1"] = Status(instance_id="f1", role="frontend", epoch="e1", draining=True)
    assert shown.state("f1") == "draining"
    assert shown.view.snapshot().instances["f1"]["url"] == "http://h:1"


def test_an_instance_of_another_protocol_is_foreign() -> None:
    assert Shown(instance("d1", protocol=UNNAMED, oldest_protocol=UNNAMED)).state("d1") == "foreign"


def test_a_status_adds_what_a_heartbeat_lacks_and_one_of_an_earlier_process_does_not() -> None:
    shown = Shown(instance("d1"))
    shown.decodes.record_heartbeat(beat("d1", num_running=2, total_pages=8))
    status = Status(
        instance_id="d1",
        role="decode",
        epoch="e1",
        num_rooms=4,
        tokens_per_s=12.34,
        queues={"running": 2, "waiting": 0},
        breakers={"p1": "open", "p2": "closed"},
        pages=PageStatus(total=8, exposed=3),
        running=99,
    )
    shown.reports.statuses["d1"] = status
    found = shown.view.snapshot().instances["d1"]
    assert (found["running"], found["rooms"], found["tps"], found["exposed"]) == (2, 4, 12.3, 3)
    assert (found["queues"], found["breakers"]) == ({"running": 2}, {"p1": "open"})
    shown.book.put("d1", instance("d1", epoch="e2"))
    assert "rooms" not in shown.view.snapshot().instances["d1"]


@pytest.mark.parametrize("order", [("p1", "d1"), ("d1", "p1")])
def test_a_link_is_counted_once_with_the_larger_figures(order: tuple[str, str]) -> None:
    shown = Shown(instance("p1", "prefill"), instance("d1"), instance("f1", "frontend"))
    statuses = {
        "p1": Status(instance_id="p1", role="prefill", links=[LinkStatus(peer="d1", transfers=5, bytes_per_s=1e6)]),
        "d1": Status(
            instance_id="d1",
            role="decode",
            links=[LinkStatus(peer="p1", transfers=4), LinkStatus(peer="gone", transfers=9)],
        ),
    }
    shown.reports.statuses = {name: statuses[name] for name in order}
    links = shown.view.snapshot().links
    assert list(links) == ["p1>d1"]
    assert (links["p1>d1"]["transfers"], links["p1>d1"]["bytes_per_s"]) == (5, 1_000_000)
    restarted = Status(instance_id="p1", role="prefill", links=[LinkStatus(peer="d1", transfers=1)])
    shown.reports.statuses["p1"] = restarted
    assert shown.view.snapshot().links["p1>d1"]["transfers"] == 4


def test_an_old_prefill_instance_is_not_new_before_the_first_answers() -> None:
    """For a second after the page opened, all prefill instances warmed up, and no KV had ever moved."""
    shown = Shown(instance("p1", "prefill"))
    shown.now_s += WARMING_S
    assert shown.state("p1") == "up"
    assert shown.view.snapshot().about["asked"] is False
    shown.reports.statuses["p1"] = Status(instance_id="p1", role="prefill")
    assert shown.view.snapshot().about["asked"] is True
