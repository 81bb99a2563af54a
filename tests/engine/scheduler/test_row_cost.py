"""A draft must be as likely as its row is expensive, which is learned from the latest steps."""

import random

import pytest

from engine.scheduler.step_cost import (
    ASSUMED_ROW_COST,
    CHANCE_MARGIN,
    MIN_ROW_COST,
    STEPS_IN_REGRESSION,
    USUAL_ROWS,
    WORK_EXPONENT,
    RowCost,
)

# milliseconds of steps by rows, with 320 tokens of context: a real model on one core and on two
ONE_CORE = {1: 11.0, 2: 11.7, 3: 12.6, 4: 14.0, 6: 16.9, 8: 21.0, 10: 27.2, 12: 30.5}
TWO_CORES = {1: 9.2, 2: 9.1, 4: 9.4, 8: 10.5, 12: 12.6}


def learned(steps: list[tuple[int, float]]) -> RowCost:
    cost = RowCost()
    for rows, step_s in steps:
        cost.stepped(rows, step_s)
    return cost


def test_before_any_step_a_row_is_supposed_to_cost_a_sixteenth_of_it() -> None:
    assert RowCost().least_chance(4, USUAL_ROWS, 1) == pytest.approx(4 * CHANCE_MARGIN * ASSUMED_ROW_COST, rel=0.1)
    assert RowCost().least_chance(1, USUAL_ROWS, 1) == pytest.approx(CHANCE_MARGIN * ASSUMED_ROW_COST, rel=0.1)
    assert RowCost().least_chance(40, 40, 1) == 1.0


@pytest.mark.parametrize(("weights_s", "row_s"), [(0.010, 0.0002), (0.006, 0.0005), (0.0, 0.001)])
def test_a_draft_pays_if_its_token_costs_less_than_the_others(weights_s: float, row_s: float) -> None:
    def takes_s(rows: int) -> float:
        return weights_s + rows**WORK_EXPONENT * row_s

    draw = random.Random(1)
    rows = [draw.randint(1, 14) for _ in range(STEPS_IN_REGRESSION)]
    cost = learned([(number, takes_s(number) * draw.uniform(0.95, 1.05)) for number in rows])
    for decodes, drafts_before, drafts in ((1, 0, 7), (4, 0, 1), (4, 4, 1), (6, 2, 2), (8, 0, 1), (8, 3, 1)):
        before = decodes + drafts_before
        draft_s = (takes_s(before + drafts) - takes_s(before)) / drafts
        chance = CHANCE_MARGIN * draft_s / (takes_s(decodes) / decodes)
        assert cost.least_chance(decodes, before, drafts) == pytest.approx(min(1, chance), rel=0.3)


@pytest.mark.parametrize("measured", [ONE_CORE, TWO_CORES])
def test_the_curve_fits_a_real_machine(measured: dict[int, float]) -> None:
    cost = learned([(rows, ms / 1000) for rows, ms in measured.items()] * 8)
    for decodes, ms in measured.items():
        for rows, all_ms in measured.items():
            if rows > decodes:
                assert 1000 * cost.without_drafts_s(decodes, rows, all_ms / 1000) == pytest.approx(ms, rel=0.13)


def test_on_one_core_the_last_places_of_a_step_need_more_certainty_than_drafts_have() -> None:
    """Eleven rows take much longer than six: even nearly certain tokens would delay other requests."""
    cost = learned([(rows, ms / 1000) for rows, ms in ONE_CORE.items()] * 8)
    assert cost.least_chance(6, 6, 1) < 0.9
    assert cost.least_chance(6, 10, 1) == 1.0
    assert cost.least_chance(2, 10, 1) < 0.6


def test_after_steps_of_one_size_the_cost_is_still_supposed() -> None:
    same = learned([(8, 0.01)] * STEPS_IN_REGRESSION)
    assert same.least_chance(8, 8, 1) == pytest.approx(RowCost().least_chance(8, 8, 1))


def test_what_a_step_takes_without_its_drafts_is_on_the_line() -> None:
    draw = random.Random(2)
    rows = [draw.randint(2, 14) for _ in range(STEPS_IN_REGRESSION)]
    cost = learned([(number, 0.01 + number**WORK_EXPONENT * 0.001) for number in rows])
    step_s, decodes_s = (0.01 + number**WORK_EXPONENT * 0.001 for number in (12, 4))
    assert cost.without_drafts_s(4, 12, step_s) == pytest.approx(decodes_s, rel=0.1)
    assert cost.without_drafts_s(4, 4, 0.02) == 0.02, "there were none"
    assert RowCost().without_drafts_s(4, 12, 0.034) == 0.034, "nothing is known"


def test_decodes_take_at_least_their_share_of_a_step() -> None:
    steep = learned([(rows, rows**WORK_EXPONENT * 0.001) for rows in range(1, 12)] * 5)
    assert steep.without_drafts_s(2, 12, 0.012) == pytest.approx(0.002)


def test_rows_are_never_free() -> None:
    shrinking = learned([(rows, 0.02 - rows * 0.001) for rows in range(1, 12)])
    assert 0 < shrinking.least_chance(1, 1, 1) < 2 * MIN_ROW_COST


def test_one_slow_step_changes_little() -> None:
    steps = [(rows, 0.01 + rows * 0.0005) for rows in (1, 3, 5, 7) * 8]
    slow = [*steps[:-1], (7, 1.0)]
    assert learned(slow).least_chance(4, 4, 1) < 2.5 * learned(steps).least_chance(4, 4, 1)


def test_what_changed_is_learned_within_the_latest_steps() -> None:
    cheap = [(rows, 0.01 + rows * 0.0002) for rows in (1, 3, 5, 7) * 20]
    dear = [(rows, 0.01 + rows * 0.002) for rows in (1, 3, 5, 7) * (STEPS_IN_REGRESSION // 4)]
    assert learned(cheap + dear).least_chance(4, 4, 1) == pytest.approx(learned(dear).least_chance(4, 4, 1))


@pytest.mark.parametrize("row_s", [0.001, 0.0])
def test_whatever_was_measured_a_chance_is_one(row_s: float) -> None:
    """The line may go through zero rows at no time, or less."""
    steps = [(rows, rows * row_s) for rows in (1, 5, 9, 13) * 30]
    assert 0 <= learned(steps).least_chance(1, 1, 1) <= 1
    assert 0 <= learned([(rows, step_s**2) for rows, step_s in steps]).least_chance(1, 1, 1) <= 1
