"""The engine's log: one line a second under load, with SGLang's names, and warnings about slow steps."""

import logging
import resource
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from components.wire.step_stats import StepStats
from engine.cpu.cpu_time import CpuQuota, run_delay_s
from engine.ports import StepOutput

log = logging.getLogger(__name__)

SLOW_FACTOR: Final = 4  # in usual times of a step
MIN_SLOW_STEP_S: Final = 0.1
STEPS_TO_LEARN: Final = 20  # of a kind, to know its usual time
LATEST_STEP_WEIGHT: Final = 0.05  # in the usual time
MIN_SHARE_OF_CAUSE: Final = 0.25  # of a step
FAULTS_PER_S: Final = 100  # major page faults
WARN_EVERY_S: Final = 30.0
READ_EVERY_S: Final = 1.0
EVERY_S: Final = 1.0


class Held(NamedTuple):
    """Total delays of this process's threads."""

    cores_s: float = 0.0  # ready but without a core
    quota_s: float = 0.0  # throttled by the CPU quota
    faults: int = 0


class SlowSteps:
    """Warns about steps that take far longer than usual. Pass every step to `stepped`, on one thread."""

    def __init__(self, held: Callable[[], Held] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._held = held or _reader(CpuQuota())
        self._clock = clock
        self._usual: dict[tuple[str, int], tuple[int, float]] = {}  # kind: (steps, usual seconds)
        self._read = clock()
        self._before = self._held()
        self._warned = float("-inf")

    def stepped(self, stats: StepStats) -> None:
        if not stats.prompt_tokens and not stats.decode_tokens:
            return
        now, step_s = self._clock(), stats.step_s
        # steps of one kind differ in tokens by less than a factor of two
        tokens = stats.prompt_tokens or stats.decode_tokens
        kind = ("prompt" if stats.prompt_tokens else "decode", tokens.bit_length())
        count, usual_s = self._usual.get(kind, (0, step_s))
        slow = count >= STEPS_TO_LEARN and step_s > max(MIN_SLOW_STEP_S, SLOW_FACTOR * usual_s)
        if slow and now - self._warned >= WARN_EVERY_S:
            self._warn(kind[0], step_s, usual_s)
            self._warned = now
        if slow or now - self._read >= READ_EVERY_S:
            self._before, self._read = self._held(), now
        if count < STEPS_TO_LEARN:
            usual_s = min(usual_s, step_s)  # the first steps touch new memory
        else:  # one slow step counts little
            usual_s += LATEST_STEP_WEIGHT * (min(step_s, 2 * usual_s) - usual_s)
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
    if held.quota_s > MIN_SHARE_OF_CAUSE * step_s:
        return "the cgroup's CPU quota is used up"
    if held.cores_s > MIN_SHARE_OF_CAUSE * step_s:
        return "other processes use these cores"
    if held.faults > FAULTS_PER_S * step_s:
        return "memory is read back from disk"
    return "unknown: the process waited neither for cores, for its CPU quota nor for the disk"


def _reader(quota: CpuQuota) -> Callable[[], Held]:
    return lambda: Held(run_delay_s(), quota.throttled_s(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


class BatchLog:
    """Sums up steps; pass `stepped` to `EngineLoop.report`."""

    def __init__(
        self,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        more: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`more` returns the service's figures. Zeros are left out."""
        self._more = more
        self._page_size = page_size
        self._clock = clock
        self._slow = SlowSteps(clock=clock)
        self._since = clock()  # when the counts below were zero
        self._last = self._since
        self._prompt_tokens = 0
        self._decode_tokens = 0

    def stepped(self, output: StepOutput) -> None:
        now, stats = self._clock(), output.stats
        self._slow.stepped(stats)
        if now - self._last > EVERY_S:  # the engine was idle
            self._begin(now - stats.step_s)
        self._last = now
        self._prompt_tokens += stats.prompt_tokens
        self._decode_tokens += stats.decode_tokens
        elapsed_s = now - self._since
        if elapsed_s < EVERY_S:
            return
        if self._prompt_tokens or self._decode_tokens:
            figures = {
                "#running-req": stats.num_running,
                "#token": stats.held_pages * self._page_size,
                "token usage": round(stats.held_pages / max(1, stats.total_pages), 2),
                "gen throughput (token/s)": round(self._decode_tokens / elapsed_s, 1),
                "input throughput (token/s)": round(self._prompt_tokens / elapsed_s, 1),
                "#queue-req": stats.num_waiting,
                "#prealloc-req": stats.num_reserved,
                "#held-req": stats.num_held,
                "#retracted-req": stats.preemptions,
                **self._more(),
                "forward": stats.forward,
            }
            log.info("batch", extra={name: figure for name, figure in figures.items() if figure})
        self._begin(now)

    def _begin(self, since: float) -> None:
        self._since = since
        self._prompt_tokens = self._decode_tokens = 0
