"""Load of all frontends together over time, for the charts of `/ui`."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from components.wire.load import LoadSample
from services.frontend.metrics import GAP_BUCKETS, TTFT_BUCKETS
from services.frontend.ui.feed import Fields
from services.frontend.ui.load_history import EVERY_S, KEPT, LoadHistory


class MeshLoad:
    def __init__(self, own: LoadHistory) -> None:
        self._own = own
        self._others: dict[str, deque[LoadSample]] = {}  # by instance id
        self._merged: dict[int, tuple[list[LoadSample], Fields]] = {}  # by interval, with what it was made of

    def last_unix_s(self, instance_id: str) -> float:
        """Return the time of the last sample of another frontend; 0 without one."""
        samples = self._others.get(instance_id)
        return samples[-1].unix_s if samples else 0.0

    def add(self, instance_id: str, samples: Iterable[LoadSample]) -> None:
        self._others.setdefault(instance_id, deque(maxlen=KEPT)).extend(samples)

    def samples(self) -> tuple[Fields, ...]:
        """Return a sample for each interval, oldest first, including those of frontends that have left."""
        intervals: dict[int, list[LoadSample]] = {}
        for sample in (sample for of in (self._own.samples, *self._others.values()) for sample in of):
            intervals.setdefault(round(sample.unix_s / EVERY_S), []).append(sample)
        latest = max(intervals, default=0)
        for name in [name for name, of in self._others.items() if not of or _is_old(of[-1], latest)]:
            del self._others[name]
        known, self._merged = self._merged, {}
        for interval in sorted(at for at in intervals if at > latest - KEPT):
            parts = intervals[interval]
            before = known.get(interval)
            self._merged[interval] = before if before and before[0] == parts else (parts, merged(interval, parts))
        return tuple(fields for _, fields in self._merged.values())


def _is_old(sample: LoadSample, latest: int) -> bool:
    return round(sample.unix_s / EVERY_S) <= latest - KEPT


def merged(interval: int, parts: Sequence[LoadSample]) -> dict[str, Any]:
    """Return the sum of `parts` as JSON. Times are in milliseconds, counts per second."""
    looked_up = sum(part.prompt_tokens for part in parts)

    def per_s(count: Callable[[LoadSample], int]) -> float:
        return round(sum(count(part) / max(part.seconds, 1e-3) for part in parts), 2)

    return {
        "t": round(interval * EVERY_S),
        "ttft": percentiles_ms([part.ttft for part in parts], TTFT_BUCKETS),
        "itl": percentiles_ms([part.gaps for part in parts], GAP_BUCKETS),
        "out": per_s(lambda part: part.generated_tokens),
        "in": per_s(lambda part: part.prompt_tokens),
        "req": per_s(lambda part: part.requests),
        "fail": per_s(lambda part: part.failed),
        "running": sum(part.running for part in parts),
        "waiting": sum(part.waiting for part in parts),
        "hit": round(sum(part.cached_tokens for part in parts) / looked_up, 3) if looked_up else None,
    }


def percentiles_ms(counts: Iterable[Sequence[int]], bounds: Sequence[float]) -> list[float] | None:
    """Return the 50th and 95th percentile of histograms with one more count than bounds; None without an observation.

    Histograms of another length, from another release, are ignored. Values are assumed to be evenly distributed within a
    bucket; values above the last bound count as that bound.
    """
    usable = [one for one in counts if len(one) == len(bounds) + 1]
    cumulative = list(accumulate(map(sum, zip(*usable, strict=True))))
    if not cumulative or cumulative[-1] <= 0:
        return None
    return [round(1000 * _quantile(cumulative, bounds, share), 2) for share in (0.5, 0.95)]


def _quantile(cumulative: Sequence[int], bounds: Sequence[float], share: float) -> float:
    rank = share * cumulative[-1]
    below = 0
    for (low, high), count in zip(pairwise([0.0, *bounds]), cumulative, strict=False):
        if count >= rank:
            return low + (high - low) * (rank - below) / max(count - below, 1e-9)
        below = count
    return bounds[-1]
