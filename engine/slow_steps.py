"""Warns about a step that took far longer than steps of its kind usually do, with the likely cause."""

import logging
import resource
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from engine.cpu_time import CpuQuota, run_delay_s
from engine.ports import StepStats

log = logging.getLogger(__name__)

SLOW: Final = 4  # times as long as usual
SLOW_S: Final = 0.1  # a shorter step is never worth a warning
KNOWN: Final = 20  # steps of a kind, after which it is known how long they usually take
LEARN: Final = 0.05  # weight of one step in the usual time
CAUSE: Final = 0.25  # of the step's time: what held threads back for so long is named as the cause
FAULTS_S: Final = 100  # pages read from disk in a second of a step
WARN_EVERY_S: Final = 30.0
READ_EVERY_S: Final = 1.0


class Held(NamedTuple):
    """What has held back the threads of this process so far; the first two are sums over its threads."""

    cores_s: float = 0.0  # ready to run, without a core
    quota_s: float = 0.0  # the cgroup's CPU quota was used up
    faults: int = 0  # pages read from disk


class SlowSteps:
    """Give it every step by `stepped`. On a thread of its own choice, but always the same."""

    def __init__(self, held: Callable[[], Held] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`held` reads what has held this process back."""
        self._held = held or _reader(CpuQuota())
        self._clock = clock
        self._usual: dict[tuple[str, int], tuple[int, float]] = {}  # kind: steps seen, their usual seconds
        self._read = clock()
        self._before = self._held()
        self._warned = float("-inf")

    def stepped(self, stats: StepStats) -> None:
        """Note one step; log a warning if it was slow, and none was logged of late."""
        if not stats.prompt_tokens and not stats.decode_tokens:
            return
        now, step_s = self._clock(), stats.step_s
        # Of one kind are steps with about as many tokens: within a factor of two.
        tokens = stats.prompt_tokens or stats.decode_tokens
        kind = ("prompt" if stats.prompt_tokens else "decode", tokens.bit_length())
        count, usual_s = self._usual.get(kind, (0, step_s))
        slow = count >= KNOWN and step_s > max(SLOW_S, SLOW * usual_s)
        if slow and now - self._warned >= WARN_EVERY_S:
            self._warn(kind[0], step_s, usual_s)
            self._warned = now
        if slow or now - self._read >= READ_EVERY_S:
            self._before, self._read = self._held(), now
        if count < KNOWN:
            usual_s = min(usual_s, step_s)  # the first ones touch memory for the first time
        else:  # a slow step counts a little, so that steps which stay slow become the usual ones
            usual_s += LEARN * (min(step_s, 2 * usual_s) - usual_s)
        self._usual[kind] = (count + 1, usual_s)

    def _warn(self, kind: str, step_s: float, usual_s: float) -> None:
        now, before = self._held(), self._before
        held = Held(now.cores_s - before.cores_s, now.quota_s - before.quota_s, now.faults - before.faults)
        log.warning(
            "slow step",
            extra={
                "kind": kind,
                "step_ms": round(1000 * step_s, 1),
                "usual_ms": round(1000 * usual_s, 1),
                "likely_cause": likely_cause(held, step_s),
                "cores_waited_for_ms": round(1000 * held.cores_s),
                "quota_waited_for_ms": round(1000 * held.quota_s),
                "pages_read_from_disk": held.faults,
            },
        )


def likely_cause(held: Held, step_s: float) -> str:
    """Why a step took so long, given what held the process back meanwhile."""
    if held.quota_s > CAUSE * step_s:
        return "the cgroup's CPU quota is used up"
    if held.cores_s > CAUSE * step_s:
        return "other processes use these cores"
    if held.faults > FAULTS_S * step_s:
        return "memory is read back from disk"
    return "unknown: the process waited neither for cores, for its CPU quota nor for the disk"


def _reader(quota: CpuQuota) -> Callable[[], Held]:
    return lambda: Held(run_delay_s(), quota.throttled_s(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt)
