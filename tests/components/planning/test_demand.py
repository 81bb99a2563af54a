"""The formulas against closed forms and a simulation of the queue that they describe."""

import heapq
import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.planning.demand import (
    StepCurve,
    StepLine,
    crowded,
    decode_workers,
    gap_s,
    late,
    prefill_workers,
    waits,
)
from components.planning.samples import Histogram


def test_one_worker_is_found_busy_as_often_as_it_is_busy() -> None:
    assert waits(1, 0.7) == pytest.approx(0.7)
    assert waits(2, 1.0) == pytest.approx(1 / 3)  # Erlang's table
    assert waits(10, 0.0) == 0.0
    assert waits(3, 3.0) == 1.0


def test_late_prompts_are_as_many_as_in_a_queue() -> None:
    """Three workers, one queue, exponential times: 40,000 arrivals are within a percent of Erlang's formula."""
    draw, service_s, patience_s, offered = random.Random(1), 0.2, 0.1, 2.1
    free, now_s, too_late = [0.0] * 3, 0.0, 0
    for _ in range(40_000):
        now_s += draw.expovariate(offered / service_s)
        start_s = max(now_s, heapq.heappop(free))
        too_late += start_s - now_s > patience_s
        heapq.heappush(free, start_s + draw.expovariate(1 / service_s))
    assert late(3, offered, patience_s, service_s, 1.0) == pytest.approx(too_late / 40_000, abs=0.01)


@given(st.floats(0.01, 50), st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 0.5), st.floats(0.3, 5))
def test_prefill_workers_are_the_fewest_that_do(
    offered: float, patience_s: float, service_s: float, share: float, variability: float
) -> None:
    found = prefill_workers(offered, patience_s, service_s, late_share=share, variability=variability)
    assert found > offered
    assert late(found, offered, patience_s, service_s, variability) <= share
    assert found == 1 or late(found - 1, offered, patience_s, service_s, variability) > share
    more = prefill_workers(1.2 * offered, patience_s, service_s, late_share=share, variability=variability)
    assert more >= found


def test_the_gap_of_a_single_decode_is_the_steps_fixed_part() -> None:
    line = StepLine(0.01, 0.001)
    assert gap_s(1, 1e-9, line, 0.9) == pytest.approx(0.011)
    mean = 0.01 / (1 - 500 * 0.001)  # half of the capacity: steps take twice as long
    assert gap_s(1, 500, line, 0.5) == pytest.approx(0.01 + 0.001 * 500 * mean)
    assert gap_s(1, 1000, line, 0.5) == float("inf")


def test_decode_workers_are_the_fewest_that_do_and_none_where_one_request_is_too_slow() -> None:
    line = StepLine(0.01, 0.001)
    assert decode_workers(1.0, line, 0.05, 0.9) == 1
    for load in (300.0, 900.0, 5000.0):
        found = decode_workers(load, line, 0.05, 0.9)
        assert found is not None
        assert gap_s(found, load, line, 0.9) <= 0.05
        assert found == 1 or gap_s(found - 1, load, line, 0.9) > 0.05
    assert decode_workers(100.0, StepLine(0.06, 0.001), 0.05, 0.9) is None


def test_a_batch_is_exceeded_for_the_given_share() -> None:
    assert crowded(16.0, 0.5) == 16.0
    assert crowded(16.0, 0.9) == pytest.approx(16 + 1.2816 * 4, rel=1e-3)


def test_a_curve_finds_the_line_in_noisy_steps_and_none_for_one_size() -> None:
    draw, curve = random.Random(2), StepCurve()
    for _ in range(50):
        curve.saw(8.0, 0.018)
    assert curve.line() is None
    for _ in range(400):
        batch = draw.uniform(1, 32)
        curve.saw(batch, (0.01 + 0.001 * batch) * draw.uniform(0.95, 1.05))
    line = curve.line()
    assert line is not None
    assert line.fixed_s == pytest.approx(0.01, rel=0.05)
    assert line.each_s == pytest.approx(0.001, rel=0.08)


def test_a_larger_batch_is_never_faster() -> None:
    curve = StepCurve()
    curve.saw(1.0, 0.02)
    curve.saw(8.0, 0.01)
    line = curve.line()
    assert line is not None
    assert line.each_s == 0.0
    assert 0.01 <= line.fixed_s <= 0.02


def test_a_histogram_knows_shares_and_differences() -> None:
    before = Histogram((0.1, 0.5, float("inf")), (2, 4, 4), 1.0)
    now = Histogram((0.1, 0.5, float("inf")), (2, 12, 14), 5.0)
    since = now.since(before)
    assert list(since.counts) == [0, 8, 10]
    assert since.mean_s == pytest.approx(0.4)
    assert since.share_within(0.3) == pytest.approx(0.4)  # half of the bucket from 0.1 to 0.5
    assert since.share_within(0.5) == pytest.approx(0.8)
    assert since.share_within(60.0) == pytest.approx(0.8), "what is past the last bound may be any time later"
    assert Histogram().share_within(0.1) == 1.0
    assert before.since(now).count == 0, "counts do not go down: this is another process"
    assert list(now.since(Histogram()).counts) == [2, 12, 14]
    assert now.plus(Histogram((1.0, float("inf")), (1, 2), 3.0)) is now, "other buckets: the one that tells of more"
    assert list(since.plus(Histogram()).counts) == [0, 8, 10]


def test_late_falls_with_patience_exponentially() -> None:
    once, twice = (late(4, 3.0, patience_s, 1.0, 2.0) for patience_s in (1.0, 2.0))
    assert twice / once == pytest.approx(exp(-0.5))
