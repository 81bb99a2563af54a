"""TTFT, ITL, throughput, queue and cache hits of this frontend over the last minutes, from its own counters."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from prometheus_client import Metric

from components.telemetry.figures import Batch
from services.frontend.metrics import FrontendMetrics

EVERY_S: Final = 2.0
KEPT: Final = 450  # samples: a quarter of an hour
FAILED_FROM: Final = 500  # HTTP status


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start of the process."""

    ttft: Sequence[float]  # cumulative counts by upper bound, as in a histogram
    gaps: Sequence[float]
    prompt_tokens: float
    cached_tokens: float
    generated_tokens: float
    requests: float
    failed: float


def totals_of(metrics: FrontendMetrics) -> Totals:
    requests = list(_samples(metrics.requests.collect(), "_total"))
    return Totals(
        ttft=_buckets(metrics.time_to_first_token.collect()),
        gaps=_buckets(metrics.gaps.collect()),
        prompt_tokens=_sum(metrics.prompt_tokens.collect()),
        cached_tokens=metrics.cached_tokens,
        generated_tokens=_sum(metrics.generation_tokens.collect()),
        requests=sum(value for _, value in requests),
        failed=sum(value for labels, value in requests if int(labels["status"]) >= FAILED_FROM),
    )


class LoadHistory:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._metrics: FrontendMetrics | None = None
        self._batch: Callable[[], Batch] = Batch
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._clock = clock
        self._at_s = clock()
        self._last: Totals | None = None

    def measure(self, metrics: FrontendMetrics, batch: Callable[[], Batch]) -> None:
        """Take samples of these from now on. `batch`: requests admitted and in the queue."""
        self._metrics = metrics
        self._batch = batch

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(EVERY_S)

    def sample(self) -> None:
        """Add what happened since the last call. The first call only starts the interval."""
        if self._metrics is None:
            return
        now_s, totals = self._clock(), totals_of(self._metrics)
        if self._last is not None and now_s > self._at_s:
            self.samples.append(self._between(self._last, totals, now_s - self._at_s, now_s))
        self._last, self._at_s = totals, now_s

    def _between(self, was: Totals, now: Totals, seconds: float, now_s: float) -> dict[str, Any]:
        assert self._metrics is not None
        looked_up = now.prompt_tokens - was.prompt_tokens
        batch = self._batch()
        return {
            "t": round(now_s, 1),
            "ttft": percentiles_ms(was.ttft, now.ttft, _bounds(self._metrics.time_to_first_token.collect())),
            "itl": percentiles_ms(was.gaps, now.gaps, _bounds(self._metrics.gaps.collect())),
            "out": round((now.generated_tokens - was.generated_tokens) / seconds, 1),
            "in": round(looked_up / seconds, 1),
            "req": round((now.requests - was.requests) / seconds, 2),
            "fail": round((now.failed - was.failed) / seconds, 2),
            "running": batch.running,
            "waiting": batch.waiting,
            "hit": round((now.cached_tokens - was.cached_tokens) / looked_up, 3) if looked_up else None,
        }


def percentiles_ms(was: Sequence[float], now: Sequence[float], bounds: Sequence[float]) -> list[float] | None:
    """Return the 50th and 95th percentile between two readings of a histogram; None without an observation.

    Within a bucket values count as evenly spread; those above the last bound count as that bound.
    """
    before = was or [0.0] * len(now)
    counts = [new - old for new, old in zip(now, before, strict=True)]
    if not counts or counts[-1] <= 0:
        return None
    return [round(1000 * _quantile(counts, bounds, share), 2) for share in (0.5, 0.95)]


def _quantile(cumulative: Sequence[float], bounds: Sequence[float], share: float) -> float:
    rank = share * cumulative[-1]
    edges = list(pairwise([0.0, *bounds]))
    below = 0.0
    for (low, high), count in zip(edges, cumulative, strict=False):
        if count >= rank:
            return low + (high - low) * (rank - below) / max(count - below, 1e-9)
        below = count
    return bounds[-1]


def _samples(metrics: Iterable[Metric], ending: str) -> Iterable[tuple[dict[str, str], float]]:
    return ((s.labels, s.value) for metric in metrics for s in metric.samples if s.name.endswith(ending))


def _sum(metrics: Iterable[Metric]) -> float:
    return sum(s.value for metric in metrics for s in metric.samples if not s.name.endswith("_created"))


def _buckets(metrics: Iterable[Metric]) -> list[float]:
    """Cumulative counts of all label sets, by bound."""
    counts: dict[float, float] = {}
    for labels, value in _samples(metrics, "_bucket"):
        bound = float(labels["le"])
        counts[bound] = counts.get(bound, 0.0) + value
    return [counts[bound] for bound in sorted(counts)]


def _bounds(metrics: Iterable[Metric]) -> list[float]:
    """Upper bounds without infinity."""
    found = {float(labels["le"]) for labels, _ in _samples(metrics, "_bucket")}
    return sorted(found - {float("inf")})
