"""Load over time, from the frontend's own counters."""

import pytest
from prometheus_client import CollectorRegistry

from components.telemetry.figures import Batch
from services.frontend.metrics import FrontendMetrics
from services.frontend.ui.load_history import KEPT, LoadHistory, percentiles_ms


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_sample_has_what_happened_since_the_one_before() -> None:
    clock, metrics = Clock(), FrontendMetrics(CollectorRegistry())
    history = LoadHistory(clock)
    history.sample()
    history.measure(metrics, lambda: Batch(3, 7))
    metrics.generation_tokens.labels("m").inc(1000)  # before the first sample: not of this interval
    history.sample()
    assert list(history.samples) == []
    clock.now_s += 2
    metrics.generation_tokens.labels("m").inc(50)
    metrics.prompt_tokens.labels("m").inc(200)
    metrics.cached_tokens += 50
    for status, count in (("200", 3), ("404", 1), ("502", 2)):
        metrics.requests.labels("m", "/v1/x", status).inc(count)
    for seconds in (0.002, 0.002, 0.03):
        metrics.time_to_first_token.labels("m", "/v1/x").observe(seconds)
        metrics.gaps.of("m").observe(seconds / 10)
    history.sample()
    [sample] = history.samples
    assert {name: sample[name] for name in ("t", "out", "in", "req", "fail", "running", "waiting", "hit")} == {
        "t": 102.0,
        "out": 25.0,
        "in": 100.0,
        "req": 3.0,
        "fail": 1.0,
        "running": 3,
        "waiting": 7,
        "hit": 0.25,
    }
    assert 1 <= sample["ttft"][0] <= 2.5
    assert 25 <= sample["ttft"][1] <= 50
    assert sample["itl"][0] <= 0.5
    clock.now_s += 2
    history.sample()
    idle = history.samples[-1]
    assert (idle["ttft"], idle["itl"], idle["hit"], idle["out"]) == (None, None, None, 0)


def test_history_is_bounded() -> None:
    clock, history = Clock(), LoadHistory()
    history = LoadHistory(clock)
    history.measure(FrontendMetrics(CollectorRegistry()), Batch)
    for _ in range(KEPT + 10):
        clock.now_s += 2
        history.sample()
    assert len(history.samples) == KEPT


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        ([], [], None),
        ([5, 5, 5], [5, 5, 5], None),
        ([], [0, 0, 0], None),
        ([], [10, 10, 10], [50, 95]),  # all within the first 100 ms, evenly
        ([10, 10, 10], [10, 20, 20], [150, 195]),
        ([], [0, 0, 4], [200, 200]),  # beyond the last bound
    ],
)
def test_percentiles_of_an_interval(was: list[float], now: list[float], expected: list[float] | None) -> None:
    assert percentiles_ms(was, now, [0.1, 0.2]) == expected
