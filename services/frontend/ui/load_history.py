"""TTFT, ITL, throughput, queue and cache hits of this frontend over the last minutes, from its own counters."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from prometheus_client import Metric

from components.messaging.call_server import Endpoint
from components.telemetry.figures import Batch
from components.wire.load import AskLoad, Load, LoadSample
from services.frontend.metrics import FrontendMetrics

EVERY_S: Final = 2.0  # by the wall clock, so that samples of several frontends cover the same seconds
KEPT: Final = 450  # samples: a quarter of an hour
FAILED_FROM: Final = 500  # HTTP status


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start of the process."""

    ttft: Sequence[int]  # by bucket
    gaps: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    requests: int
    failed: int


def totals_of(metrics: FrontendMetrics) -> Totals:
    requests = list(_samples(metrics.requests.collect(), "_total"))
    return Totals(
        ttft=_buckets(metrics.time_to_first_token.collect()),
        gaps=_buckets(metrics.gaps.collect()),
        prompt_tokens=_sum(metrics.prompt_tokens.collect()),
        cached_tokens=metrics.cached_tokens,
        generated_tokens=metrics.gaps.num_tokens,
        requests=int(sum(value for _, value in requests)),
        failed=int(sum(value for labels, value in requests if int(labels["status"]) >= FAILED_FROM)),
    )


class LoadHistory:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._metrics: FrontendMetrics | None = None
        self._batch: Callable[[], Batch] = Batch
        self.samples: deque[LoadSample] = deque(maxlen=KEPT)
        self._clock = clock
        self._at_s = clock()
        self._last: Totals | None = None

    def measure(self, metrics: FrontendMetrics, batch: Callable[[], Batch]) -> None:
        """Sample these metrics from now on. `batch`: returns the numbers of admitted and queued requests."""
        self._metrics = metrics
        self._batch = batch

    def endpoint(self) -> Endpoint:
        """Return the endpoint by which other frontends fetch the samples."""

        async def load(ask: AskLoad) -> Load:
            return Load(samples=[sample for sample in self.samples if sample.unix_s > ask.after_unix_s])

        return Endpoint("load", AskLoad, load, runs_inline=True, is_idempotent=True)

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(EVERY_S - self._clock() % EVERY_S)

    def sample(self) -> None:
        """Add a sample of the time since the last one. The first call only starts the interval.

        A call less than half an interval later does nothing, because two samples would be in one interval.
        """
        now_s = self._clock()
        if self._metrics is None or (self._last is not None and 0 <= now_s - self._at_s <= EVERY_S / 2):
            return
        totals = totals_of(self._metrics)
        if self._last is not None and now_s > self._at_s:
            self.samples.append(self._between(self._last, totals, now_s))
        self._last, self._at_s = totals, now_s

    def _between(self, was: Totals, now: Totals, now_s: float) -> LoadSample:
        batch = self._batch()
        return LoadSample(
            unix_s=now_s,
            seconds=now_s - self._at_s,
            ttft=_difference(was.ttft, now.ttft),
            gaps=_difference(was.gaps, now.gaps),
            prompt_tokens=now.prompt_tokens - was.prompt_tokens,
            cached_tokens=now.cached_tokens - was.cached_tokens,
            generated_tokens=now.generated_tokens - was.generated_tokens,
            requests=now.requests - was.requests,
            failed=now.failed - was.failed,
            running=batch.running,
            waiting=batch.waiting,
        )


def _difference(was: Sequence[int], now: Sequence[int]) -> list[int]:
    """Return the differences. `was` is empty until the first observation."""
    return [new - old for new, old in zip(now, was or [0] * len(now), strict=True)]


def _samples(metrics: Iterable[Metric], ending: str) -> Iterable[tuple[dict[str, str], float]]:
    return ((s.labels, s.value) for metric in metrics for s in metric.samples if s.name.endswith(ending))


def _sum(metrics: Iterable[Metric]) -> int:
    return int(sum(value for _, value in _samples(metrics, "_total")))


def _buckets(metrics: Iterable[Metric]) -> list[int]:
    """Return the counts by bucket, summed over all label sets."""
    cumulative: dict[float, float] = {}
    for labels, value in _samples(metrics, "_bucket"):
        bound = float(labels["le"])
        cumulative[bound] = cumulative.get(bound, 0.0) + value
    return [
        int(above - below) for below, above in pairwise([0.0, *(cumulative[bound] for bound in sorted(cumulative))])
    ]
