"""Decisions for simulated fleets: within bounds, one at a time, without oscillation, and only after reports."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.planning.needs import Targets
from components.planning.planner import Bounds, Change, Pace, Planner, Verdict
from components.planning.samples import PLANNED, FrontendSample, Histogram, Observation, Planned, WorkerSample

SERVICE_S = 0.2  # of a prompt of 1,000 tokens
STEP_S, EACH_S = 0.01, 0.001
TARGETS = Targets(ttft_s=1.0, itl_s=0.05)
PACE = Pace()
WIDE = {"prefill": Bounds(1, 8), "decode": Bounds(1, 8)}


@dataclass
class MadeUp:
    """A fleet that shares its load evenly; prompts wait in one queue."""

    counts: dict[Planned, int] = field(default_factory=lambda: dict.fromkeys(PLANNED, 1))
    start_s: float = 20.0
    noise: random.Random | None = None
    now_s: float = 1000.0
    backlog_s: float = 0.0  # queued work
    coming: list[tuple[float, Planned]] = field(default_factory=list)
    done: dict[str, WorkerSample] = field(default_factory=dict)
    names: dict[Planned, list[str]] = field(default_factory=lambda: {role: [] for role in PLANNED})
    born: int = 0
    devices: dict[Planned, int] = field(default_factory=dict)  # of each worker of a role; default: 1

    def __post_init__(self) -> None:
        for role in PLANNED:
            for _ in range(self.counts[role]):
                self.join(role)

    def join(self, role: Planned) -> None:
        name = f"{role}-{self.born}"
        self.born += 1
        self.names[role].append(name)
        self.done[name] = WorkerSample(name, 0.0, 0, 0, 0, 0, 0, 0.0, 0, 1000, devices=self.devices.get(role, 1))

    def run(self, seconds: float, prompts_per_s: float, tokens_per_s: float) -> Observation:
        """Run under a load; return an observation."""
        self.now_s += seconds
        for _, role in [c for c in self.coming if c[0] <= self.now_s]:
            self.join(role)
        self.coming = [c for c in self.coming if c[0] > self.now_s]
        arrived = prompts_per_s * seconds
        if self.noise is not None:
            arrived = max(0.0, self.noise.gauss(arrived, arrived**0.5))
        names = self.names["prefill"]
        work_s = self.backlog_s + arrived * SERVICE_S
        busy_s = min(work_s, len(names) * seconds)
        self.backlog_s = work_s - busy_s
        for name in names:
            was, share = self.done[name], busy_s / len(names)
            self.done[name] = replace(
                was,
                busy_s=was.busy_s + share,
                steps=was.steps + 10,
                prompt_tokens=was.prompt_tokens + round(share / SERVICE_S * 1000),
                accepted=was.accepted + round(arrived / len(names)),
                queued_tokens=round(self.backlog_s / len(names) / SERVICE_S * 1000),
                waiting=self.backlog_s / SERVICE_S / len(names),
            )
        names = self.names["decode"]
        load = tokens_per_s / len(names)
        step_s = STEP_S / max(0.05, 1 - load * EACH_S)
        if self.noise is not None:
            step_s *= self.noise.uniform(0.95, 1.05)
        batch = load * step_s
        for name in names:
            was = self.done[name]
            steps = round(seconds / step_s)
            self.done[name] = replace(
                was,
                busy_s=was.busy_s + steps * step_s,
                steps=was.steps + steps,
                generated_tokens=was.generated_tokens + round(steps * batch),
                used_pages=round(10 * batch),
            )
        return self.look()

    def look(self) -> Observation:
        workers = {role: [self.done[name] for name in self.names[role]] for role in PLANNED}
        return Observation(self.now_s, dict(self.counts), workers, [FrontendSample("frontend")])

    def follow(self, change: Change) -> None:
        self.counts[change.role] = change.after
        if change.after > change.before:
            self.coming.append((self.now_s + self.start_s, change.role))
        else:
            self.names[change.role].pop()


def play(
    fleet: MadeUp, planner: Planner, load: Iterable[tuple[float, float]], every_s: float = PACE.every_s
) -> list[tuple[float, Change]]:
    """Run each load, (prompts/s, tokens/s), for `every_s`, and carry out the decisions."""
    changes = []
    for prompts_per_s, tokens_per_s in load:
        verdict = planner.see(fleet.run(every_s, prompts_per_s, tokens_per_s))
        if verdict.change is not None:
            planner.took(verdict.change, fleet.now_s)
            fleet.follow(verdict.change)
            changes.append((fleet.now_s, verdict.change))
    return changes


def steady(prompts_per_s: float, tokens_per_s: float, seconds: float) -> Sequence[tuple[float, float]]:
    return [(prompts_per_s, tokens_per_s)] * round(seconds / PACE.every_s)


def directions(changes: Iterable[tuple[float, Change]], role: Planned) -> list[int]:
    return [change.after - change.before for _, change in changes if change.role == role]


def test_prefill_follows_the_load_up_and_down() -> None:
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    up = directions(play(fleet, planner, steady(14.0, 200.0, 900)), "prefill")  # 2.8 workers busy
    assert fleet.counts["prefill"] in (4, 5)
    assert up == sorted(up, reverse=True), "workers to clear the queue go when it is cleared, and do not come again"
    assert fleet.counts["decode"] == 1
    down = play(fleet, planner, steady(1.0, 20.0, 800))
    assert fleet.counts["prefill"] == 1
    assert set(directions(down, "prefill")) == {-1}


def test_a_queue_without_new_prompts_is_cleared_before_workers_leave() -> None:
    """A minute after a burst, workers left although its prompts were still queued."""
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    play(fleet, planner, steady(1.0, 100.0, 120))
    changes = play(fleet, planner, [(400.0, 100.0), *steady(0.0, 100.0, 120)])
    assert fleet.backlog_s < 1.0
    assert fleet.counts["prefill"] >= 6
    assert set(directions(changes, "prefill")) == {1}


def test_decode_follows_the_load_up_and_down() -> None:
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    play(fleet, planner, [(1.0, 200.0 + 5 * i) for i in range(400)])  # to 2,200 tokens/s; one worker cannot make 1,000
    assert fleet.counts["decode"] in (3, 4)
    assert fleet.counts["prefill"] == 1
    play(fleet, planner, steady(1.0, 200.0, 1200))
    assert fleet.counts["decode"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_steady_load_with_noise_settles(seed: int) -> None:
    """With a load between two numbers, changes become rarer, in the end one each half hour."""
    draw = random.Random(seed)
    fleet = MadeUp(noise=draw)
    planner = Planner(TARGETS, WIDE)
    changes = play(fleet, planner, steady(draw.uniform(2, 25), draw.uniform(100, 4000), 7200))
    late = [c for c in changes if c[0] > 1000 + 3600]
    assert len(late) <= 4, [(round(at), c.role, c.before, c.after) for at, c in changes]


loads = st.lists(st.tuples(st.floats(0, 60), st.floats(0, 9000), st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), st.integers(0, 200))
def test_it_stays_within_its_bounds_and_changes_one_worker_at_a_time(
    load: list[tuple[float, float, int]], least: int, more: int, at_first: int, start_s: int
) -> None:
    bounds = {"prefill": Bounds(least, least + more), "decode": Bounds(1, 3)}
    fleet = MadeUp(counts={"prefill": at_first, "decode": 1}, start_s=float(start_s))
    planner = Planner(TARGETS, bounds)
    for prompts_per_s, tokens_per_s, times in load:
        for _ in range(times):
            verdict = planner.see(fleet.run(PACE.every_s, prompts_per_s, tokens_per_s))
            for role, need in verdict.needs.items():
                assert bounds[role].least <= need.now <= bounds[role].most
            if (change := verdict.change) is None:
                continue
            assert not fleet.coming, "a second change while the first was under way"
            assert change.before == fleet.counts[change.role]
            assert abs(change.after - change.before) == 1
            here = bounds[change.role]
            outside = not here.least <= change.before <= here.most
            assert outside or here.least <= change.after <= here.most
            planner.took(change, fleet.now_s)
            fleet.follow(change)


def test_nothing_is_decided_before_half_a_window_was_seen_nor_across_a_gap() -> None:
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    for _ in range(5):
        assert planner.see(fleet.run(5.0, 40.0, 100.0)).hold == "too few observations yet"
    assert play(fleet, planner, steady(40.0, 100.0, 20))
    fleet.run(60.0, 40.0, 100.0)  # without observations
    again = planner.see(fleet.run(5.0, 40.0, 100.0))
    assert again.change is None
    assert again.hold.startswith(("too few", "waiting"))


def grown(idle_s: float) -> tuple[MadeUp, Planner]:
    """Return a fleet of three prefill workers, of which one would suffice."""
    fleet = MadeUp(counts={"prefill": 3, "decode": 1})
    planner = Planner(TARGETS, WIDE)
    assert not play(fleet, planner, steady(1.0, 20.0, idle_s))
    return fleet, planner


def after(fleet: MadeUp, planner: Planner, seconds: float, **facts: object) -> list[Verdict]:
    """Return the verdicts of observations in which `facts` replace the fleet's."""
    looks = (fleet.run(5.0, 1.0, 20.0) for _ in range(round(seconds / 5)))
    return [planner.see(replace(look, **facts)) for look in looks]


def test_no_worker_is_removed_while_an_instance_does_not_report() -> None:
    fleet, planner = grown(110)
    assert not any(verdict.change for verdict in after(fleet, planner, 300, unknown=["prefill-9"]))
    calm = after(fleet, planner, 110)
    assert not any(verdict.change for verdict in calm), "the time counts from when all workers report"
    assert any(verdict.change for verdict in after(fleet, planner, 30))


def test_a_worker_is_added_while_an_instance_does_not_report() -> None:
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    looks = (replace(fleet.run(5.0, 40.0, 20.0), unknown=["frontend-9"]) for _ in range(12))
    assert [change for look in looks if (change := planner.see(look).change)]


def test_no_worker_is_removed_while_one_is_lost() -> None:
    fleet, planner = grown(110)
    lost = fleet.names["decode"].pop()
    fleet.names["decode"].append(lost)
    fleet.counts["prefill"] = 4  # one has died
    verdicts = after(fleet, planner, 300)
    assert not any(verdict.change for verdict in verdicts)
    assert verdicts[-1].hold == "3 of 4 prefill workers serve"


def test_no_connector_no_change() -> None:
    fleet, planner = grown(110)
    verdicts = after(fleet, planner, 300, wanted={})
    assert {verdict.hold for verdict in verdicts} == {"the connector does not report the number of workers"}


def test_nothing_changes_while_no_worker_of_a_role_reports() -> None:
    fleet, planner = grown(200 - 90)
    verdicts = after(fleet, planner, 300, workers={"prefill": [], "decode": fleet.look().workers["decode"]})
    assert not any(verdict.change for verdict in verdicts)


def test_the_planner_waits_for_a_change_up_to_a_limit() -> None:
    fleet = MadeUp(start_s=1e9)
    planner = Planner(TARGETS, WIDE, replace(PACE, start_timeout_s=100.0, retry_s=50.0))
    changes = play(fleet, planner, steady(40.0, 100.0, 600))
    times = [at for at, _ in changes]
    assert len(times) >= 2
    assert all(later - sooner >= 150 for sooner, later in pairwise(times))


def test_a_worker_that_never_comes_is_taken_back_when_the_load_is_gone() -> None:
    """The planner never removed a worker again, because one had never reported."""
    fleet = MadeUp(start_s=1e9)
    planner = Planner(TARGETS, WIDE, replace(PACE, start_timeout_s=100.0, retry_s=50.0))
    changes = play(fleet, planner, [*steady(40.0, 100.0, 200), *steady(1.0, 20.0, 2000)])
    assert any(change.after > change.before for _, change in changes)
    assert any(change.after < change.before for _, change in changes)


@pytest.mark.parametrize("drained", [False, True])
def test_a_lost_worker_is_replaced_and_no_healthy_one_leaves(drained: bool) -> None:
    """A crashed or drained worker blocked all additions. Later it counted as one too many, and a healthy one left."""
    fleet = MadeUp(counts={"prefill": 2, "decode": 1})
    planner = Planner(TARGETS, {"prefill": Bounds(1, 4), "decode": Bounds(1, 4)})
    assert not play(fleet, planner, steady(7.5, 100.0, 300))  # 1.5 workers busy
    gone = fleet.done[fleet.names["prefill"].pop()]
    idle = [replace(gone, draining=True, queued_tokens=0, waiting=0.0)] if drained else []
    changes, longest_s = [], 0.0
    for _ in range(720):
        seen = fleet.run(5.0, 7.5, 100.0)
        longest_s = max(longest_s, fleet.backlog_s)
        seen = replace(seen, workers={**seen.workers, "prefill": [*seen.workers["prefill"], *idle]})
        if (change := planner.see(seen).change) is not None:
            planner.took(change, fleet.now_s)
            fleet.follow(change)
            changes.append(change)
    assert [(change.role, change.before, change.after) for change in changes] == [("prefill", 2, 3)]
    assert (len(fleet.names["prefill"]), fleet.backlog_s) == (2, 0.0)
    assert longest_s < 60.0


def test_an_addition_is_over_when_a_worker_has_come_though_another_one_is_dead() -> None:
    """With a dead worker each addition took ten minutes and counted as failed, so a rising load was not followed."""
    fleet = MadeUp(counts={"prefill": 3, "decode": 1})
    planner = Planner(TARGETS, WIDE, replace(PACE, start_timeout_s=100.0))
    play(fleet, planner, steady(7.5, 100.0, 60))
    fleet.names["prefill"].pop()
    assert not play(fleet, planner, steady(7.5, 100.0, 300))
    changes = play(fleet, planner, steady(25.0, 100.0, 300))  # 5 workers busy
    assert len(fleet.names["prefill"]) >= 6
    assert set(directions(changes, "prefill")) == {1}


def test_with_the_most_workers_ordered_a_dead_one_is_not_replaced() -> None:
    fleet = MadeUp(counts={"prefill": 2, "decode": 1})
    planner = Planner(TARGETS, {"prefill": Bounds(1, 2), "decode": Bounds(1, 2)}, replace(PACE, start_timeout_s=100.0))
    play(fleet, planner, steady(7.5, 100.0, 60))
    fleet.names["prefill"].pop()
    assert not play(fleet, planner, steady(7.5, 100.0, 300))
    verdict = planner.see(fleet.run(5.0, 7.5, 100.0))
    assert verdict.hold == "1 of 2 prefill workers serve, and no more are allowed"


def test_misses_while_a_worker_was_away_are_no_ceiling_when_it_is_back() -> None:
    """The queue after a crash of 100 s counted as a miss of all workers: more were kept for half an hour."""
    fleet = MadeUp(counts={"prefill": 2, "decode": 1})
    planner = Planner(TARGETS, {"prefill": Bounds(2, 8), "decode": Bounds(1, 8)}, replace(PACE, up_after_s=1e9))
    within = late = total_s = 0.0

    def pass_s(seconds: float) -> Verdict:
        nonlocal within, late, total_s
        verdict = Verdict({})
        for _ in range(round(seconds / 5)):
            seen = fleet.run(5.0, 4.9, 100.0)
            wait_s = fleet.backlog_s / len(fleet.names["prefill"])
            within, late = (within, late + 24.5) if wait_s > 0.8 else (within + 24.5, late)
            total_s += 24.5 * (wait_s + SERVICE_S)
            ttft = Histogram((1.0, float("inf")), (within, within + late), total_s)
            verdict = planner.see(replace(seen, frontends=[FrontendSample("frontend", ttft)]))
        return verdict

    calm = pass_s(300).needs["prefill"].now
    fleet.names["prefill"].pop()
    fleet.backlog_s = 20.0  # of the dead worker, whose prompts are retried
    pass_s(100)
    fleet.join("prefill")
    assert pass_s(600).needs["prefill"].now == calm == 2


def test_a_gap_that_no_number_of_workers_keeps_does_not_hold_decode_workers() -> None:
    """A step of one request took longer than the ITL target, so no worker was ever removed."""
    fleet = MadeUp(counts={"prefill": 1, "decode": 8})
    planner = Planner(replace(TARGETS, itl_s=0.0105), WIDE)
    play(fleet, planner, [*steady(1.0, 2000.0, 120), *steady(1.0, 3000.0, 120)])  # to fit the line
    play(fleet, planner, steady(1.0, 100.0, 1800))
    assert fleet.counts["decode"] == 1


def test_a_change_that_is_taken_back_is_left_for_a_while() -> None:
    """A worker cannot start, so its supervisor reduces the number."""
    fleet = MadeUp(start_s=1e9)
    planner = Planner(TARGETS, WIDE)
    times = []
    for _ in range(120):
        verdict = planner.see(fleet.run(5.0, 40.0, 100.0))
        if verdict.change is not None:
            planner.took(verdict.change, fleet.now_s)
            times.append(fleet.now_s)
    assert len(times) >= 3
    assert all(later - sooner >= PACE.retry_s for sooner, later in pairwise(times))


@pytest.mark.parametrize("others", [1, 3])
def test_a_change_that_another_planner_overtakes_is_not_waited_for(
    others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The planner changed from 3 workers to 2, while an operator scaled to 4: it waited 12 minutes."""
    caplog.set_level("INFO")
    fleet, planner = grown(110)
    while (change := planner.see(fleet.run(5.0, 1.0, 20.0)).change) is None:
        pass
    assert (change.role, change.before, change.after) == ("prefill", 3, 2)
    planner.took(change, fleet.now_s)
    fleet.counts["prefill"] = 3 + others
    for _ in range(others):
        fleet.join("prefill")
    assert not after(fleet, planner, 5)[0].hold.startswith("waiting for")
    assert "a scaling change was dropped" in caplog.text
    later = next(change for verdict in after(fleet, planner, 60) if (change := verdict.change))
    assert (later.role, later.before) == ("prefill", 3 + others)


def test_a_worker_that_was_let_go_too_early_makes_it_more_patient() -> None:
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    waves: list[tuple[float, float]] = []
    for _ in range(12):
        waves += [*steady(14.0, 100.0, 150), *steady(1.0, 20.0, 220)]
    changes = play(fleet, planner, waves)
    downs = [at for at, change in changes if change.after < change.before]
    assert len(downs) >= 2
    halves = [sum(at < 1000 + 2220 for at in downs), sum(at >= 1000 + 2220 for at in downs)]
    assert halves[1] < halves[0]


def test_what_is_outside_its_bounds_is_brought_back() -> None:
    fleet = MadeUp(counts={"prefill": 1, "decode": 4}, start_s=5.0)
    planner = Planner(TARGETS, {"prefill": Bounds(2, 3), "decode": Bounds(1, 2)})
    play(fleet, planner, steady(1.0, 20.0, 200))
    assert fleet.counts["prefill"] == 2
    assert fleet.counts["decode"] <= 2


def test_bounds_hold_before_the_load_is_known() -> None:
    """An operator who sets `--prefill 2..3` gets two workers at once, not after half a window."""
    fleet = MadeUp(counts={"prefill": 1, "decode": 1})
    planner = Planner(TARGETS, {"prefill": Bounds(2, 3), "decode": Bounds(1, 2)})
    verdict = planner.see(fleet.run(5.0, 1.0, 20.0))
    assert not verdict.needs
    assert verdict.change == Change("prefill", 1, 2, "at least 2")


def test_pages_that_are_held_call_for_decode() -> None:
    fleet = MadeUp()
    planner = Planner(TARGETS, WIDE)
    changes = []
    for _ in range(20):
        look = fleet.run(5.0, 1.0, 20.0)
        full = [replace(worker, used_pages=950) for worker in look.workers["decode"]]
        verdict = planner.see(replace(look, workers={**look.workers, "decode": full}))
        changes += [verdict.change] if verdict.change else []
    assert changes
    assert {(change.role, change.after) for change in changes} == {("decode", 2)}
    assert changes[0].why == "950 of 1000 pages are held"


@pytest.mark.parametrize(("devices", "most", "ordered"), [(1, 6, 4), (2, 7, 2), (2, 6, 1), (4, 5, 0), (4, None, 7)])
def test_workers_are_added_while_there_are_devices_for_them(devices: int, most: int | None, ordered: int) -> None:
    """A prefill worker has `devices` and a decode worker one; the load needs over eight prefill workers."""
    fleet = MadeUp(devices={"prefill": devices})
    planner = Planner(TARGETS, WIDE, PACE, most_devices=most)
    held = set()
    for _ in range(120):
        seen = fleet.run(5.0, 60.0, 100.0)
        verdict = planner.see(seen)
        held.add(verdict.hold)
        if verdict.change is not None:
            fleet.follow(verdict.change)
            planner.took(verdict.change, fleet.now_s)
    assert fleet.counts == {"prefill": 1 + ordered, "decode": 1}
    used = (1 + ordered) * devices + 1
    full = f"another prefill worker needs {devices} devices, and {used} of {most} are in use"
    assert (full in held) == (most is not None)


def test_workers_without_a_report_keep_their_devices() -> None:
    """A silent worker of four devices counted as one device, and another worker was added."""
    fleet = MadeUp(devices={"decode": 4})
    pace = replace(PACE, start_timeout_s=100.0)
    planner = Planner(TARGETS, {"prefill": Bounds(1, 2), "decode": Bounds(2, 2)}, pace, most_devices=8)
    play(fleet, planner, steady(1.0, 20.0, 20))
    silent = after(fleet, planner, 300, workers={"prefill": fleet.look().workers["prefill"], "decode": []})
    assert not any(verdict.change for verdict in silent)
