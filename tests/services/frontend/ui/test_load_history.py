"""Load over time, from frontends' own counters."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from components.telemetry.figures import Batch
from components.wire.load import AskLoad, Load, LoadSample
from services.frontend.metrics import GAP_BUCKETS, TTFT_BUCKETS, FrontendMetrics
from services.frontend.ui.load_history import EVERY_S, KEPT, LoadHistory
from services.frontend.ui.mesh_load import MeshLoad, percentiles_ms


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def busy() -> tuple[LoadHistory, Clock]:
    """A history with one sample: three requests in two seconds."""
    clock, metrics = Clock(), FrontendMetrics(CollectorRegistry())
    history = LoadHistory(clock)
    history.sample()
    history.measure(metrics, lambda: Batch(3, 7))
    metrics.gaps.of("m").num_tokens += 1000  # before the first sample: not of this interval
    history.sample()
    assert list(history.samples) == []
    clock.now_s += 2
    metrics.gaps.of("m").num_tokens += 50
    metrics.prompt_tokens.labels("m").inc(200)
    metrics.cached_tokens += 50
    for status, count in (("200", 3), ("404", 1), ("502", 2)):
        metrics.requests.labels("m", "/v1/x", status).inc(count)
    for seconds in (0.002, 0.002, 0.03):
        metrics.time_to_first_token.labels("m", "/v1/x").observe(seconds)
        metrics.gaps.of("m").observe(seconds / 10)
    history.sample()
    return history, clock


def test_a_sample_has_what_happened_since_the_one_before() -> None:
    history, clock = busy()
    [sample] = history.samples
    assert (sample.unix_s, sample.seconds, sample.running, sample.waiting) == (102.0, 2.0, 3, 7)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.generated_tokens) == (200, 50, 50)
    assert (sample.requests, sample.failed) == (6, 2)
    assert (len(sample.ttft), len(sample.gaps)) == (len(TTFT_BUCKETS) + 1, len(GAP_BUCKETS) + 1)
    assert (sum(sample.ttft), sum(sample.gaps)) == (3, 3)
    clock.now_s += 2
    history.sample()
    assert (sum(history.samples[-1].ttft), history.samples[-1].requests) == (0, 0)


def test_a_clock_that_wakes_a_little_early_makes_one_sample_of_an_interval() -> None:
    """24 requests ran in the picture and six in truth: four samples of one interval were added up."""
    history, clock = busy()
    for at_s in (103.9995, 104.0001, 104.0002, 106.0):
        clock.now_s = at_s
        history.sample()
    assert [sample.unix_s for sample in history.samples] == [102.0, 103.9995, 106.0]
    assert [sample["running"] for sample in MeshLoad(history).samples()] == [3, 3, 3]


def test_another_frontend_gets_the_samples_that_it_lacks() -> None:
    history, clock = busy()
    clock.now_s += 2
    history.sample()
    endpoint = history.endpoint()
    for after, expected in ((0.0, [102.0, 104.0]), (102.0, [104.0]), (104.0, [])):
        answer: Load = asyncio.run(endpoint.handler(AskLoad(after_unix_s=after)))
        assert [sample.unix_s for sample in answer.samples] == expected


def test_history_is_bounded() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.measure(FrontendMetrics(CollectorRegistry()), Batch)
    for _ in range(KEPT + 10):
        clock.now_s += EVERY_S
        history.sample()
    assert len(history.samples) == KEPT
    assert len(MeshLoad(history).samples()) == KEPT


def test_frontends_are_added_up_interval_by_interval() -> None:
    own, _ = busy()
    load = MeshLoad(own)
    [alone] = load.samples()
    assert {name: alone[name] for name in ("t", "out", "in", "req", "fail", "running", "waiting", "hit")} == {
        "t": 102,
        "out": 25.0,
        "in": 100.0,
        "req": 3.0,
        "fail": 1.0,
        "running": 3,
        "waiting": 7,
        "hit": 0.25,
    }
    assert 1 <= alone["ttft"][0] <= 2.5
    assert 25 <= alone["ttft"][1] <= 50
    assert load.samples()[0] is alone, "what has not changed is not computed again"
    slow = [0] * 12 + [30] + [0] * (len(TTFT_BUCKETS) - 12)
    other = LoadSample(
        unix_s=102.3, seconds=2.0, ttft=slow, prompt_tokens=200, cached_tokens=150, running=1, requests=2
    )
    load.add("f2", [other])
    [both] = load.samples()
    assert (both["t"], both["running"], both["req"], both["hit"]) == (102, 4, 4.0, 0.5)
    assert both["ttft"][0] > 1000
    assert load.last_unix_s("f2") == 102.3
    assert load.last_unix_s("f3") == 0.0


def test_a_frontend_that_left_long_ago_is_forgotten() -> None:
    own, clock = busy()
    load = MeshLoad(own)
    load.add("f2", [LoadSample(unix_s=102.0, seconds=2.0)])
    clock.now_s += EVERY_S * (KEPT + 1)
    own.sample()
    assert len(load.samples()) == 1
    assert load.last_unix_s("f2") == 0.0


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], None),
        ([[0, 0, 0]], None),
        ([[1, 2]], None),  # of another release, with other buckets
        ([[10, 0, 0]], [50, 95]),  # all within the first 100 ms, evenly
        ([[0, 5, 0], [0, 5, 0], [9, 9]], [150, 195]),
        ([[0, 0, 4]], [200, 200]),  # beyond the last bound
    ],
)
def test_percentiles_of_histograms(counts: list[list[int]], expected: list[float] | None) -> None:
    assert percentiles_ms(counts, [0.1, 0.2]) == expected
