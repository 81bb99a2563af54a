"""When to change the number of workers: one at a time, without oscillation."""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from components.planning.history import History
from components.planning.needs import Need, Needs, Targets
from components.planning.samples import PLANNED, Observation, Planned

log = logging.getLogger(__name__)

LONGEST_PATIENCE: Final = 16
GAP: Final = 3.0  # longest gap between observations, as a multiple of `every_s`


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int = 1
    most: int = 1

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"

    def within(self, workers: int) -> int:
        return min(self.most, max(self.least, workers))


@dataclass(frozen=True, slots=True)
class Pace:
    every_s: float = 5.0  # between observations
    window_s: float = 60.0  # averaging time
    up_after_s: float = 10.0  # how long more workers must be needed
    down_after_s: float = 120.0  # how long fewer must be enough
    start_s: float = 30.0  # of a worker's start, until measured
    settle_s: float = 15.0  # between a change and a worker's removal
    start_timeout_s: float = 600.0  # for a worker to start or drain
    retry_s: float = 120.0  # after a failed change


@dataclass(frozen=True, slots=True)
class Change:
    role: Planned
    before: int
    after: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    needs: Mapping[Planned, Need]  # within the bounds; empty: unknown
    change: Change | None = None
    hold: str = ""  # reason for no change


@dataclass(slots=True)
class _Role:
    bounds: Bounds
    above_since_s: float | None = None
    enough: deque[tuple[float, int]] = field(default_factory=deque)  # (time, sufficient workers)
    missing_since_s: float | None = None
    given_up: bool = False  # missing workers are not expected
    never_came: int = 0  # requested workers that did not start
    went_down_s: float | None = None
    devices: int = 1  # per worker, as last reported
    patience: int = 1  # factor of `down_after_s`; doubled by a removal too early


@dataclass(frozen=True, slots=True)
class _Pending:
    change: Change
    since_s: float
    serving: int  # when it was requested
    draining: int  # the same, without the one that it removes


class Planner:
    """A verdict for each observation. The caller reports a change's outcome with `took` or `failed`."""

    def __init__(
        self,
        targets: Targets,
        bounds: Mapping[Planned, Bounds],
        pace: Pace = Pace(),
        most_devices: int | None = None,
    ) -> None:
        """`most_devices`: of all workers together; None: no limit."""
        self._most_devices = most_devices
        self.needs = Needs(targets)
        self._pace = pace
        self._history = History(pace.window_s, GAP * pace.every_s)
        self._roles = {role: _Role(bounds[role]) for role in PLANNED}
        self._pending: _Pending | None = None
        self._last = Observation(float("-inf"), {}, {})
        self._settled_s = float("-inf")  # since when all wanted workers serve, without a change
        self._not_before_s = float("-inf")
        self._start_s = pace.start_s

    def took(self, change: Change, now_s: float) -> None:
        """The next change waits for the effect of this one."""
        self._pending = _Pending(change, now_s, self._last.serving(change.role), self._last.draining(change.role))
        role = self._roles[change.role]
        regret_s = 4 * self._pace.down_after_s
        if change.after < change.before:
            if role.went_down_s is not None and now_s - role.went_down_s > regret_s:
                role.patience = max(1, role.patience // 2)
            role.went_down_s = now_s
            role.never_came = max(0, role.never_came - 1)
        elif role.went_down_s is not None and now_s - role.went_down_s < regret_s:
            role.patience = min(LONGEST_PATIENCE, 2 * role.patience)
            role.went_down_s = None

    def failed(self, now_s: float) -> None:
        self._pending = None
        self._not_before_s = now_s + self._pace.retry_s

    def see(self, now: Observation) -> Verdict:
        for role, state in self._roles.items():
            if now.workers.get(role):
                state.devices = now.devices(role)
        span = self._history.see(now)
        if span is None:
            self._forget()
            self.needs.forget()
            self._settled_s = now.at_s
        else:
            self.needs.saw(span)
        self._note_missing(now)
        self._last = now
        if self._history.seconds < self._pace.window_s / 2:
            return self._verdict({}, now, "too few observations yet")
        total = self._history.total()
        steady_s = 0.0 if self._pending is not None or now.unknown else now.at_s - self._settled_s
        if not all(now.serving(role) for role in PLANNED):
            self._forget()
            return self._verdict({}, now, "no worker of a role reports")
        ahead_s = self._pace.window_s / 2 + self._pace.up_after_s + self._start_s
        needs = self.needs.needs(now, total, steady_s=steady_s, ahead_s=ahead_s)
        needs = self._bounded(needs)
        self._note(needs, now)
        return self._verdict(needs, now, "")

    def _note_missing(self, now: Observation) -> None:
        """Record since when each role lacks workers. A change of their number means that the load is unsettled."""
        for role, state in self._roles.items():
            serving = now.serving(role)
            if serving != self._last.serving(role):
                self._settled_s = now.at_s
            if not now.wanted:
                continue
            if serving >= now.wanted[role]:
                state.missing_since_s, state.given_up, state.never_came = None, False, 0
                continue
            if state.missing_since_s is None:
                state.missing_since_s = now.at_s
            state.given_up |= now.at_s - state.missing_since_s >= self._pace.start_timeout_s
            if not state.given_up:
                self._settled_s = now.at_s

    def _present(self, role: Planned, now: Observation) -> int:
        """The workers that serve or are expected to."""
        wanted = now.wanted[role]
        return min(wanted, now.serving(role)) if self._roles[role].given_up else wanted

    def _bounded(self, needs: Mapping[Planned, Need]) -> dict[Planned, Need]:
        return {
            role: Need(state.bounds.within(needs[role].now), state.bounds.within(needs[role].shrunk), needs[role].why)
            for role, state in self._roles.items()
        }

    def _forget(self) -> None:
        for state in self._roles.values():
            state.above_since_s = None
            state.enough.clear()

    def _note(self, needs: Mapping[Planned, Need], now: Observation) -> None:
        if not now.wanted:
            self._forget()
            return
        for role, state in self._roles.items():
            need = needs[role]
            if need.now <= self._present(role, now):
                state.above_since_s = None
            elif state.above_since_s is None:
                state.above_since_s = now.at_s
            if now.unknown:  # an instance without a report may have work
                state.enough.clear()
                continue
            state.enough.append((now.at_s, max(need.now, need.shrunk)))
            longest_s = state.patience * self._pace.down_after_s + GAP * self._pace.every_s
            while state.enough[0][0] < now.at_s - longest_s:
                state.enough.popleft()

    def _verdict(self, needs: Mapping[Planned, Need], now: Observation, hold: str) -> Verdict:
        change, why = self._decide(needs, now)
        return Verdict(needs, change, "" if change else hold or why)

    def _decide(self, needs: Mapping[Planned, Need], now: Observation) -> tuple[Change | None, str]:
        if blocked := self._blocked(now):
            return None, blocked
        up, full = self._up(needs, now)
        if up is not None:
            return up, ""
        if missing := self._missing(now):
            return None, full or missing
        down = self._down(now)
        if down is not None and now.unknown:
            return None, "not all workers report, so none is removed"
        if down is not None and now.at_s - self._settled_s < self._pace.settle_s:
            return None, "the last change settles"
        return down, full

    def _blocked(self, now: Observation) -> str:
        if not now.wanted:
            return "the connector does not report the number of workers"
        if self._pending is not None and (waiting := self._follow(self._pending, now)):
            return waiting
        if now.at_s < self._not_before_s:
            return "the last change failed"
        return ""

    def _follow(self, pending: _Pending, now: Observation) -> str:
        change, waited_s = pending.change, now.at_s - pending.since_s
        serving, wanted = now.serving(change.role), now.wanted[change.role]
        if change.after > change.before:
            done = serving > pending.serving
        else:
            drained = now.draining(change.role) <= pending.draining
            done = serving <= change.after and drained and not now.unknown
        if done:
            if change.after > change.before:
                self._start_s += (waited_s - self._start_s) / 4
            self._pending, self._settled_s = None, now.at_s
            return ""
        if wanted not in (change.before, change.after):
            log.info(
                "a scaling change was dropped: another process has set the number of workers",
                extra={"role": change.role, "to": change.after, "workers": wanted},
            )
            self._pending, self._settled_s = None, now.at_s
            return ""
        if wanted == change.before and waited_s > GAP * self._pace.every_s:
            self.failed(now.at_s)
            return f"the change of {change.role} to {change.after} was undone"
        if waited_s > self._pace.start_timeout_s:
            self.failed(now.at_s)
            if change.after > change.before:
                self._roles[change.role].never_came += 1
            return f"{change.role} is not at {change.after} after {waited_s:.0f} s"
        return f"waiting for {change.after} {change.role} workers, for {waited_s:.0f} s"

    def _missing(self, now: Observation) -> str:
        """Why no worker may be removed: one is starting or draining. Empty: none is."""
        for role in PLANNED:
            serving, wanted = now.serving(role), now.wanted[role]
            if self._roles[role].given_up:
                continue
            if serving != wanted:
                return f"{serving} of {wanted} {role} workers serve"
            if now.draining(role):
                return f"a {role} worker drains"
        return ""

    def _up(self, needs: Mapping[Planned, Need], now: Observation) -> tuple[Change | None, str]:
        """The most urgent addition that is allowed, or why there is none."""
        ups: list[tuple[float, Change]] = []
        for role, state in self._roles.items():
            here = now.wanted[role]
            if here < state.bounds.least:
                ups.append((inf, Change(role, here, here + 1, f"at least {state.bounds.least}")))
                continue
            since_s = state.above_since_s
            long = since_s is not None and now.at_s - since_s >= self._pace.up_after_s
            if role in needs and long:
                urgency = needs[role].now / max(1, self._present(role, now))
                ups.append((urgency, Change(role, here, here + 1, needs[role].why)))
        ups.sort(key=lambda up: -up[0])
        fitting = [change for _, change in ups if not self._lacking(change.role, now)]
        if fitting or not ups:
            return (fitting[0] if fitting else None), ""
        return None, self._lacking(ups[0][1].role, now)

    def _lacking(self, role: Planned, now: Observation) -> str:
        """Why no worker may be added to a role; empty if one may."""
        if now.wanted[role] >= self._roles[role].bounds.most:
            return f"{now.serving(role)} of {now.wanted[role]} {role} workers serve, and no more are allowed"
        used, needed = sum(now.wanted[one] * self._roles[one].devices for one in PLANNED), self._roles[role].devices
        if self._most_devices is None or used + needed <= self._most_devices:
            return ""
        return f"another {role} worker needs {needed} devices, and {used} of {self._most_devices} are in use"

    def _down(self, now: Observation) -> Change | None:
        downs = []
        for role, state in self._roles.items():
            here = now.wanted[role]
            if here > state.bounds.most:
                return Change(role, here, here - 1, f"at most {state.bounds.most}")
            for_s = state.patience * self._pace.down_after_s
            if not state.enough or now.at_s - state.enough[0][0] < for_s:
                continue
            enough = max(workers for at_s, workers in state.enough if at_s >= now.at_s - for_s)
            present = min(here, self._present(role, now) + state.never_came)
            if enough < present:
                downs.append(
                    (enough / present, Change(role, here, here - 1, f"{enough} were enough for {for_s:.0f} s"))
                )
        return min(downs, key=lambda down: down[0])[1] if downs else None
