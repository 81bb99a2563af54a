"""Formulas for the number of workers that a load needs, derived in docs/planner.md, with sources."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, floor, inf, log2, sqrt
from statistics import NormalDist
from typing import Final

MAX_WORKERS: Final = 1000
NEWEST: Final = 0.03  # minimum weight of a new sample


def waits(workers: int, offered: float) -> float:
    """Share of arrivals that find all `workers` busy (Erlang's C)."""
    if offered <= 0:
        return 0.0
    if offered >= workers:
        return 1.0
    blocked = 1.0  # Erlang's B, by recursion over workers
    for count in range(1, workers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / workers * (1 - blocked))


def late(workers: int, offered: float, patience_s: float, service_s: float, variability: float) -> float:
    """Share of arrivals that wait longer than `patience_s`. Source: Erlang; Allen, Cunneen: `variability`."""
    if offered >= workers:
        return 1.0
    if service_s <= 0:
        return 0.0
    return waits(workers, offered) * exp(-(workers - offered) * patience_s / (variability * service_s))


def prefill_workers(
    offered: float, patience_s: float, service_s: float, *, late_share: float, variability: float
) -> int:
    """Return the fewest workers with which at most `late_share` of the prompts wait longer than `patience_s`.

    Args:
        offered: arriving work in workers, that is, seconds of computing per second.
        patience_s: accepted wait.
        service_s: mean computing time of a prompt.
        late_share: accepted share of late prompts, 0 to 1.
        variability: 1 for random arrivals and lengths, more for bursts.
    """
    fewest = max(1, floor(offered) + 1)
    for workers in range(fewest, MAX_WORKERS):
        if late(workers, offered, patience_s, service_s, variability) <= late_share:
            return workers
    return MAX_WORKERS


@dataclass(slots=True)
class _Bucket:
    batch: float = 0.0
    step_s: float = 0.0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class StepLine:
    """Duration of a decode step in seconds: `fixed_s + each_s · batch`."""

    fixed_s: float
    each_s: float


class StepCurve:
    """Step times by batch size, in equally weighted buckets of a factor √2."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def saw(self, batch: float, step_s: float) -> None:
        if batch <= 0 or step_s <= 0:
            return
        place = floor(2 * log2(batch))
        bucket = self._buckets.setdefault(place, _Bucket())
        bucket.samples += 1
        weight = max(NEWEST, 1 / bucket.samples)
        bucket.batch += weight * (batch - bucket.batch)
        bucket.step_s += weight * (step_s - bucket.step_s)

    def line(self) -> StepLine | None:
        """Fit by least squares of relative errors; None while all sizes are within a factor of 1.5."""
        seen = list(self._buckets.values())
        if not seen or max(b.batch for b in seen) < 1.5 * min(b.batch for b in seen):
            return None
        return _fit((b.batch, b.step_s) for b in seen)


def _fit(points: Iterable[tuple[float, float]]) -> StepLine:
    ones = rows = squares = sums = products = 0.0
    for batch, step_s in points:
        weight = 1 / (step_s * step_s)
        ones += weight
        rows += weight * batch
        squares += weight * batch * batch
        sums += weight * step_s
        products += weight * batch * step_s
    spread = ones * squares - rows * rows
    each_s = (ones * products - rows * sums) / spread if spread > 0 else 0.0
    fixed_s = (sums - each_s * rows) / ones
    if each_s < 0:  # noise
        return StepLine(sums / ones, 0.0)
    if fixed_s < 0:
        return StepLine(0.0, products / squares)
    return StepLine(fixed_s, each_s)


def crowded(batch: float, share: float) -> float:
    """The quantile `share` of a Poisson distribution with mean `batch`, by its normal approximation."""
    return batch + max(0.0, NormalDist().inv_cdf(share)) * sqrt(batch)


def gap_s(workers: int, tokens_per_s: float, line: StepLine, share: float) -> float:
    """The ITL within which `share` of the tokens are when `workers` generate `tokens_per_s`. Source: Little's law."""
    left = 1 - tokens_per_s * line.each_s / workers
    if left <= 0:
        return inf
    step_s = line.fixed_s / left
    return line.fixed_s + line.each_s * max(1.0, crowded(tokens_per_s / workers * step_s, share))


def decode_workers(tokens_per_s: float, line: StepLine, target_s: float, share: float) -> int | None:
    """The fewest workers whose ITL is within `target_s`; None if a single request is too slow."""
    if line.fixed_s + line.each_s > target_s:
        return None
    for workers in range(1, MAX_WORKERS):
        if gap_s(workers, tokens_per_s, line, share) <= target_s:
            return workers
    return MAX_WORKERS
