"""A fleet whose size the planner chooses, with the planner's view and delays."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from bench.simulate.fleet import Fleet
from bench.simulate.group import Group
from bench.simulate.measured import BINS
from bench.simulate.worker import Worker
from components.planning.needs import Targets
from components.planning.planner import Bounds, Change, Pace, Planner
from components.planning.samples import (
    PLANNED,
    FrontendSample,
    Histogram,
    Observation,
    Planned,
    WorkerSample,
)

BOUNDS_PER_E = 8  # buckets per factor of e, about as many as on a frontend's metrics page


@dataclass(frozen=True, slots=True)
class Plan:
    prefill: Bounds
    decode: Bounds
    targets: Targets = field(default_factory=Targets)
    pace: Pace = field(default_factory=Pace)
    start_s: float = 30.0  # time from the request for a worker until it serves
    most_devices: int | None = None  # limit for all workers together

    def bounds(self, role: Planned) -> Bounds:
        return self.prefill if role == "prefill" else self.decode


class PlannedFleet:
    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self.planner = Planner(
            plan.targets, {role: plan.bounds(role) for role in PLANNED}, plan.pace, plan.most_devices
        )
        self.changes: list[tuple[float, Change]] = []
        self._fleet = fleet
        self._plan = plan
        self._wanted: dict[Planned, int] = {role: len(self._group(role).workers) for role in PLANNED}
        fleet.is_planned = True
        fleet.clock.at(0.0, self._tick)

    def _group(self, role: Planned) -> Group:
        return self._fleet.prefills if role == "prefill" else self._fleet.decodes

    def _tick(self, _: object) -> None:
        clock = self._fleet.clock
        verdict = self.planner.see(self.observe())
        if (change := verdict.change) is not None:
            self.planner.took(change, clock.now_s)
            self.changes.append((clock.now_s, change))
            self._order(change)
        clock.at(clock.now_s + self._plan.pace.every_s, self._tick)

    def _order(self, change: Change) -> None:
        clock, group = self._fleet.clock, self._group(change.role)
        self._wanted[change.role] = change.after
        if change.after > change.before:
            self._fleet.joining += 1
            clock.at(clock.now_s + self._plan.start_s, self._join, (group, clock.now_s))
        else:
            newest = next(w for w in reversed(group.workers) if w.alive and not w.draining)
            self._fleet.drain(group, newest)

    def _join(self, ordered: tuple[Group, float]) -> None:
        group, ordered_s = ordered
        self._fleet.joining -= 1
        self._fleet.join(group).since_s = ordered_s  # costs are counted from the request

    def observe(self) -> Observation:
        measured = self._fleet.measured
        frontend = FrontendSample(
            "frontend",
            ttft=_histogram(measured.firsts, measured.firsts_s),
            itl=_histogram(measured.gaps, 0.0),
        )
        workers = {role: self._samples(self._group(role)) for role in PLANNED}
        return Observation(self._fleet.clock.now_s, dict(self._wanted), workers, [frontend])

    def _samples(self, group: Group) -> Sequence[WorkerSample]:
        return [_sample(group, worker) for worker in group.workers if worker.alive]


def _sample(group: Group, worker: Worker) -> WorkerSample:
    done = worker.progress()
    return WorkerSample(
        instance_id=worker.name,
        busy_s=done.busy_s,
        steps=done.steps,
        prompt_tokens=done.prompt_tokens,
        generated_tokens=done.generated_tokens,
        accepted=group.accepted[worker],
        queued_tokens=worker.queued_now(),
        waiting=len(worker.waiting),
        used_pages=worker.pool.used,
        total_pages=worker.pool.total,
        draining=worker.draining,
        devices=worker.engine.devices,
    )


def _histogram(counted: Counter[int], total_s: float) -> Histogram:
    bounds = [exp((i - 8 * BOUNDS_PER_E) / BOUNDS_PER_E) for i in range(14 * BOUNDS_PER_E)] + [float("inf")]
    counts = [0.0] * len(bounds)
    for place, count in counted.items():
        upper = -(-(place + 1) * BOUNDS_PER_E // BINS) + 8 * BOUNDS_PER_E  # the first bound that is not smaller
        counts[min(max(upper, 0), len(bounds) - 1)] += count
    for i in range(1, len(counts)):
        counts[i] += counts[i - 1]
    return Histogram(bounds, counts, total_s)
