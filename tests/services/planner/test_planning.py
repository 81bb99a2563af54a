"""A planner process acts on its decisions only if it leads, and logs once if it has no connector."""

import logging
import time
from collections.abc import Mapping

import pytest

from components.discovery.leader import Leadership
from components.errors import BackendUnavailable
from components.planning.planner import Change
from components.planning.samples import Observation, Planned
from components.wire.plans import AskPlan
from services.planner.config import PlannerSettings
from services.planner.metrics import PlannerMetrics
from services.planner.planning import Planning
from tests.components.planning.test_planner import MadeUp

pytestmark = pytest.mark.anyio

BUSY = (30.0, 100.0)  # the work of six prefill workers


class Fleet:
    """An observer and a connector of a made-up fleet."""

    def __init__(self) -> None:
        self.fleet = MadeUp()
        self.ordered: list[Change] = []
        self.silent = self.broken = False

    async def observe(self, wanted: Mapping[Planned, int]) -> Observation:
        seen = self.fleet.run(5.0, *BUSY)
        return Observation(seen.at_s, wanted, seen.workers, seen.frontends, ["gone"])

    async def counts(self) -> Mapping[Planned, int]:
        if self.silent:
            raise BackendUnavailable("away")
        return dict(self.fleet.counts)

    async def scale(self, change: Change) -> None:
        if self.broken:
            raise BackendUnavailable("no room")
        self.ordered.append(change)
        self.fleet.follow(change)


def planning(fleet: Fleet, *, acts: bool = True, leads: bool = True) -> tuple[Planning, Leadership]:
    leadership = Leadership()
    if leads:
        leadership.held_until(time.monotonic() + 60)
    settings = PlannerSettings(prefill="1..4", decode="1..2", connector="local" if acts else "none")
    connector = fleet if acts else None
    clock = lambda: fleet.fleet.now_s  # noqa: E731
    return Planning(settings, fleet, connector, leadership, PlannerMetrics(), clock=clock), leadership


async def test_the_leader_acts_and_another_planner_acts_once_it_leads() -> None:
    fleet = Fleet()
    plan, leadership = planning(fleet, leads=False)
    for _ in range(20):
        await plan.step()
    assert not fleet.ordered
    assert not (await plan.plan(AskPlan())).leading
    leadership.held_until(time.monotonic() + 60)
    await plan.step()
    assert [(c.role, c.before, c.after) for c in fleet.ordered] == [("prefill", 1, 2)], "it has watched meanwhile"
    told = await plan.plan(AskPlan())
    assert told.leading
    assert (told.prefill.serving, told.prefill.wanted, told.prefill.most) == (1, 1, 4)
    assert told.prefill.needed == 4
    assert told.unknown == ["gone"]
    assert "prefill 1 → 2: prompts keep" in told.changes[0]
    leadership.held_until(0.0)
    for _ in range(40):
        await plan.step()
    assert len(fleet.ordered) == 1


async def test_without_a_connector_a_decision_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    plan, _ = planning(fleet, acts=False)
    with caplog.at_level(logging.INFO):
        for _ in range(30):
            await plan.step()
    said = [vars(record) for record in caplog.records if record.message == "would scale"]
    assert [(facts["role"], facts["before"], facts["after"]) for facts in said] == [("prefill", 1, 2)]
    assert fleet.fleet.counts == {"prefill": 1, "decode": 1}
    assert (await plan.plan(AskPlan())).connector == "none"


@pytest.mark.parametrize("up_s", [10.0, 1e9], ids=["just started", "long up"])
async def test_after_a_failed_change_the_planner_waits(up_s: float, caplog: pytest.LogCaptureFixture) -> None:
    """On a newly started machine it was repeated every five seconds: the pause was measured on another clock."""
    fleet = Fleet()
    fleet.fleet.now_s = up_s
    fleet.broken = True
    plan, _ = planning(fleet)
    for _ in range(30):
        await plan.step()
    refused = [record for record in caplog.records if record.message == "not scaled"]
    assert len(refused) == 1, "it would be asked every five seconds"
    assert vars(refused[0])["cause"] == "no room"


async def test_a_silent_connector_is_reported_once_and_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.silent = True
    plan, _ = planning(fleet)
    for _ in range(30):
        await plan.step()
    assert not fleet.ordered
    assert [vars(record)["cause"] for record in caplog.records if record.levelno == logging.WARNING] == ["away"]
    assert (await plan.plan(AskPlan())).hold == "the connector does not report the number of workers"
