"""A planner's observations. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

Planned = Literal["prefill", "decode"]
PLANNED: Final[tuple[Planned, ...]] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Counters since the process's start, and the present load."""

    instance_id: str
    busy_s: float  # time in engine steps
    steps: int  # with work
    prompt_tokens: int
    generated_tokens: int  # without accepted drafts of speculative decoding
    accepted: int
    queued_tokens: int  # of prompts
    waiting: float  # requests, preferably the mean since the last sample
    used_pages: int
    total_pages: int
    draining: bool = False
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram as in Prometheus: each count includes those of smaller bounds."""

    bounds: Sequence[float] = ()  # seconds, ascending; the last one is infinite
    counts: Sequence[float] = ()
    total_s: float = 0.0

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0

    def since(self, before: "Histogram") -> "Histogram":
        """The difference; empty if the two cannot be of one process."""
        if not before.bounds:
            return self
        if list(before.bounds) != list(self.bounds) or before.count > self.count:
            return Histogram()
        counts = [max(0.0, now - was) for now, was in zip(self.counts, before.counts, strict=True)]
        return Histogram(self.bounds, counts, max(0.0, self.total_s - before.total_s))

    def plus(self, other: "Histogram") -> "Histogram":
        """The sum; if the bounds differ, as between versions, the histogram with more observations."""
        if not self.bounds:
            return other
        if not other.bounds:
            return self
        if list(self.bounds) != list(other.bounds):
            return max(self, other, key=lambda histogram: histogram.count)
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total_s + other.total_s)

    def share_within(self, limit_s: float) -> float:
        """The share of values up to `limit_s`, interpolated within a bucket."""
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
    """Histograms since the start of the process."""

    instance_id: str
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class Observation:
    at_s: float  # monotonic
    wanted: Mapping[Planned, int]  # as the connector reports; empty: unknown
    workers: Mapping[Planned, Sequence[WorkerSample]]  # those that reported
    frontends: Sequence[FrontendSample] = ()
    unknown: Sequence[str] = ()  # ids without a report

    def serving(self, role: Planned) -> int:
        return sum(not worker.draining for worker in self.workers.get(role, ()))

    def devices(self, role: Planned) -> int:
        """The devices that another worker would need: as many as the largest present one."""
        return max((worker.devices for worker in self.workers.get(role, ())), default=1)

    def draining(self, role: Planned) -> int:
        return len(self.workers.get(role, ())) - self.serving(role)
