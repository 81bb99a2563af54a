"""A simulated fleet of the planner, compared with fixed ones on the same traffic."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import exp
from pathlib import Path
from random import Random

import pytest

from bench.load.workloads import lognormal, poisson_times_s
from bench.simulate.fleet import Fleet
from bench.simulate.incidents import Incident
from bench.simulate.measured import BINS, Measured, Slo
from bench.simulate.planned import BOUNDS_PER_E, Plan, PlannedFleet, _histogram
from bench.simulate.routers import MakePolicy
from bench.simulate.setup import Setup
from bench.simulate.traffic import Request, swinging
from bench.simulate.worker import Engine
from components.planning.needs import Targets
from components.planning.planner import Bounds
from components.routing.policies import WorkerRole, parse_policy
from engine.config import MockConfig
from tests.waiting import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
SLO = Slo(3.0, 0.05)
PLAN = Plan(Bounds(1, 7), Bounds(1, 4), Targets(ttft_s=SLO.ttft_s, itl_s=SLO.tpot_s))
ENGINE = Engine(MockConfig(), num_pages=2048, page_tokens=64)


def least_load(role: WorkerRole) -> MakePolicy:
    return lambda rng: parse_policy("least_load").make(role, rng)


def day(seed: int, count: int) -> Iterator[Request]:
    """Yield 2.5 requests a second on average, 4.5 at noon and 0.5 at night; a day has an hour."""
    draw = Random(seed)
    times = poisson_times_s(draw, 2.5)
    level = (Request(n, next(times), lognormal(draw, 1600, 0.6), lognormal(draw, 300, 0.6), []) for n in range(count))
    return swinging(level, 0.8, 3600.0)


def fleet_of(prefill: int, decode: int, seed: int, count: int, incidents: tuple[Incident, ...] = ()) -> Fleet:
    setup = Setup(decode, prefill, ENGINE, slo=SLO)
    return Fleet(setup, day(seed, count), least_load("decode"), least_load("prefill"), incidents)


def figures(measured: Measured) -> tuple[float, float]:
    """Return the share of requests that keep the SLO, and worker-seconds."""
    told = measured.figures()
    return told["slo"], told["worker_s"]


def test_a_swinging_rate_is_that_much_higher_and_lower_and_loses_nobody() -> None:
    requests = list(swinging((Request(n, n * 0.1, 1, 1, []) for n in range(18_000)), 0.5, 900.0))
    assert len(requests) == 18_000
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    noon = sum(175 <= request.at_s < 275 for request in requests)
    night = sum(625 <= request.at_s < 725 for request in requests)
    assert noon == pytest.approx(1500, rel=0.03)
    assert night == pytest.approx(500, rel=0.03)


def test_the_planner_keeps_the_slo_of_a_large_fleet_with_fewer_worker_seconds() -> None:
    """6 + 4 workers are for noon. 4 + 3 cost as much as the planner's, but miss the SLO of every sixth request."""
    count = 9000
    large, large_s = figures(fleet_of(6, 4, 1, count).run())
    fleet = fleet_of(3, 2, 1, count)
    planned = PlannedFleet(fleet, PLAN)
    kept, spent_s = figures(fleet.run())
    assert len(fleet.measured.e2e_s) == count
    assert large > 0.95
    assert kept > large - 0.05
    assert spent_s < 0.75 * large_s
    assert all(abs(change.after - change.before) == 1 for _, change in planned.changes)
    orders = [at_s for at_s, _ in planned.changes]
    assert all(later - sooner >= PLAN.pace.every_s for sooner, later in pairwise(orders))


def test_crashed_workers_do_not_count_as_unneeded() -> None:
    """Two prefill workers die and are not restarted: the planner waits, and removes no worker."""
    fleet = fleet_of(4, 2, 2, 900, (Incident(100.0, "crash", "prefill", 0), Incident(101.0, "crash", "prefill", 1)))
    planned = PlannedFleet(fleet, PLAN)
    fleet.run()
    assert len(fleet.measured.e2e_s) == 900
    assert not [change for at_s, change in planned.changes if at_s > 100 and change.after < change.before]


def test_a_time_is_in_the_first_bucket_whose_bound_is_no_less() -> None:
    """0.5 s counted as 0.472 s, so a simulated planner missed targets by as much."""
    for place in range(-100, 100):
        found = _histogram(Counter({place: 1}), 1.0)
        bound = next(bound for bound, count in zip(found.bounds, found.counts, strict=True) if count)
        longest_s = exp((place + 1) / BINS)
        assert longest_s <= bound * 1.000001
        assert longest_s > bound * exp(-1 / BOUNDS_PER_E)


def test_the_command_line_shows_a_planned_fleet_beside_fixed_ones() -> None:
    command = [sys.executable, "-m", "bench.simulate", "--requests", "200", "--rate", "5", "--swing", "0.5"]
    command += ["--policy", "least_load", "--prefill", "1", "--decode", "1", "--fixed", "2/1", "--planner", "1..3/1..2"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:]] == [
        "least_load",
        "least_load 2/1",
        "least_load planned",
    ]
    wrong = subprocess.run(
        [*command[:-1], "3"], cwd=REPO, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert wrong.returncode == 2
    assert "LEAST..MOST/LEAST..MOST" in wrong.stderr


def test_a_planned_fleet_keeps_to_its_devices() -> None:
    """Without the limit it would add four at noon."""
    setup = Setup(1, 1, ENGINE, prefill_engine=replace(ENGINE, devices=2), slo=SLO)
    fleet = Fleet(setup, day(3, 3000), least_load("decode"), least_load("prefill"))
    planned = PlannedFleet(fleet, replace(PLAN, most_devices=6))
    fleet.run()
    used = {"prefill": 1, "decode": 1}
    assert planned.changes
    for _, change in planned.changes:
        used[change.role] = change.after
        assert 2 * used["prefill"] + used["decode"] <= 6
