"""What a planner sees at one moment. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

Planned = Literal["prefill", "decode"]
PLANNED: Final[tuple[Planned, ...]] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Counters since the worker's process started, and its present load."""

    instance_id: str
    busy_s: float  # in engine steps
    steps: int  # with work
    prompt_tokens: int
    generated_tokens: int
    accepted: int  # requests
    queued_tokens: int  # of prompts, accepted and not computed
    running: int  # requests in the batch
    waiting: float  # requests without a step yet; better a mean since the last sample than a moment
    used_pages: int
    total_pages: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by upper bound as in Prometheus: each count includes all smaller ones."""

    bounds: Sequence[float] = ()  # seconds, ascending; the last one is infinite
    counts: Sequence[float] = ()
    total_s: float = 0.0  # of all observations

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean_s(self) -> float:
        """0 if there are none."""
        return self.total_s / self.count if self.count else 0.0

    def since(self, before: "Histogram") -> "Histogram":
        """Observations after `before`; none if the two cannot be of one process."""
        if not before.bounds:  # no observations yet
            return self
        if list(before.bounds) != list(self.bounds) or before.count > self.count:
            return Histogram()
        counts = [max(0.0, now - was) for now, was in zip(self.counts, before.counts, strict=True)]
        return Histogram(self.bounds, counts, max(0.0, self.total_s - before.total_s))

    def plus(self, other: "Histogram") -> "Histogram":
        """The sum; if the bounds differ, as for frontends of two versions, the histogram with more observations."""
        if not self.bounds:
            return other
        if not other.bounds:
            return self
        if list(self.bounds) != list(other.bounds):
            return max(self, other, key=lambda histogram: histogram.count)
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total_s + other.total_s)

    def share_within(self, limit_s: float) -> float:
        """Share of the observations up to `limit_s`, interpolated within a bucket."""
        if not self.count:
            return 1.0
        if limit_s < self.bounds[0]:
            return self.counts[0] / self.count * max(0.0, limit_s) / self.bounds[0]
        buckets = zip(pairwise(self.bounds), pairwise(self.counts), strict=True)
        for (lower, upper), (below, above) in buckets:
            if limit_s < upper:
                part = (limit_s - lower) / (upper - lower) if upper < float("inf") else 0.0
                return (below + part * (above - below)) / self.count
        return 1.0


@dataclass(frozen=True, slots=True)
class FrontendSample:
    """Its histograms since it started."""

    instance_id: str
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class Observation:
    """All that is known at `at_s`, a monotonic time."""

    at_s: float
    wanted: Mapping[Planned, int]  # workers that the connector keeps, started or not; empty: it did not answer
    workers: Mapping[Planned, Sequence[WorkerSample]]  # those that reported
    frontends: Sequence[FrontendSample] = ()
    unknown: Sequence[str] = ()  # ids of registered instances that are silent or cannot be read

    def serving(self, role: Planned) -> int:
        return sum(not worker.draining for worker in self.workers.get(role, ()))

    def draining(self, role: Planned) -> int:
        return len(self.workers.get(role, ())) - self.serving(role)
