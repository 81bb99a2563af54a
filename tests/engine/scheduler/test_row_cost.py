"""A draft must be as likely as its row is expensive, which is learned from the latest steps."""

import random

import pytest

from engine.scheduler.step_cost import ASSUMED_ROW_COST, CHANCE_MARGIN, MIN_ROW_COST, STEPS_IN_REGRESSION, RowCost


def learned(steps: list[tuple[int, float]]) -> RowCost:
    cost = RowCost()
    for rows, step_s in steps:
        cost.stepped(rows, step_s)
    return cost


def test_before_any_step_a_row_is_supposed_to_cost_a_sixteenth_of_it() -> None:
    assert [RowCost().least_chance(decodes) for decodes in (1, 8, 40)] == [
        CHANCE_MARGIN * ASSUMED_ROW_COST,
        8 * CHANCE_MARGIN * ASSUMED_ROW_COST,
        1.0,
    ]


@pytest.mark.parametrize(("weights_s", "row_s"), [(0.010, 0.0005), (0.006, 0.002), (0.0, 0.001)])
def test_a_draft_pays_if_its_token_costs_less_than_the_others(weights_s: float, row_s: float) -> None:
    draw = random.Random(1)
    rows = [draw.randint(1, 14) for _ in range(STEPS_IN_REGRESSION)]
    cost = learned([(number, (weights_s + number * row_s) * draw.uniform(0.95, 1.05)) for number in rows])
    for decodes in (1, 4, 8):
        others_s = (weights_s + decodes * row_s) / decodes
        assert cost.least_chance(decodes) == pytest.approx(min(1, CHANCE_MARGIN * row_s / others_s), rel=0.3)


def test_after_steps_of_one_size_the_cost_is_still_supposed() -> None:
    assert learned([(8, 0.01)] * STEPS_IN_REGRESSION).least_chance(8) == pytest.approx(
        8 * CHANCE_MARGIN * ASSUMED_ROW_COST
    )


def test_what_a_step_takes_without_its_drafts_is_on_the_line() -> None:
    draw = random.Random(2)
    rows = [draw.randint(2, 14) for _ in range(STEPS_IN_REGRESSION)]
    cost = learned([(number, 0.01 + number * 0.002) for number in rows])
    assert cost.without_drafts_s(4, 12, 0.034) == pytest.approx(0.018, rel=0.1)
    assert cost.without_drafts_s(4, 4, 0.02) == 0.02, "there were none"
    assert RowCost().without_drafts_s(4, 12, 0.034) == 0.034, "nothing is known"


def test_decodes_take_at_least_their_share_of_a_step() -> None:
    steep = learned([(rows, rows * 0.002) for rows in range(1, 12)] * 5)
    assert steep.without_drafts_s(2, 12, 0.012) == pytest.approx(0.002)


def test_rows_are_never_free() -> None:
    shrinking = learned([(rows, 0.02 - rows * 0.001) for rows in range(1, 12)])
    assert 0 < shrinking.least_chance(1) < 2 * MIN_ROW_COST


def test_one_slow_step_changes_little() -> None:
    steps = [(rows, 0.01 + rows * 0.0005) for rows in (1, 3, 5, 7) * 8]
    slow = [*steps[:-1], (7, 1.0)]
    assert learned(slow).least_chance(4) < 2.5 * learned(steps).least_chance(4)


def test_what_changed_is_learned_within_the_latest_steps() -> None:
    cheap = [(rows, 0.01 + rows * 0.0002) for rows in (1, 3, 5, 7) * 20]
    dear = [(rows, 0.01 + rows * 0.002) for rows in (1, 3, 5, 7) * (STEPS_IN_REGRESSION // 4)]
    assert learned(cheap + dear).least_chance(4) == pytest.approx(learned(dear).least_chance(4))


@pytest.mark.parametrize("row_s", [0.001, 0.0])
def test_without_decodes_no_chance_is_needed(row_s: float) -> None:
    """The line may go through zero rows at no time, or less."""
    steps = [(rows, rows * row_s) for rows in (1, 5, 9, 13) * 30]
    assert learned(steps).least_chance(0) == 0
    assert learned([(rows, step_s**2) for rows, step_s in steps]).least_chance(0) == 0
    assert 0 <= learned([(rows, step_s**2) for rows, step_s in steps]).least_chance(1) <= 1
