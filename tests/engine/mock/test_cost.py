from math import inf

import pytest
from pydantic import ValidationError

from engine.config import MockConfig

COST = MockConfig(step_s=0.01, decode_s=0.002, context_token_s=0.0001, prompt_token_s=0.001)


@pytest.mark.parametrize(
    ("prompt_tokens", "decodes", "context_tokens", "expected_s"),
    [(0, 0, 0, 0.0), (100, 0, 0, 0.11), (0, 1, 50, 0.017), (0, 8, 400, 0.066), (10, 2, 100, 0.034)],
)
def test_a_step_costs_what_is_in_it(prompt_tokens: int, decodes: int, context_tokens: int, expected_s: float) -> None:
    assert COST.duration_s(prompt_tokens, decodes, context_tokens) == pytest.approx(expected_s)


def test_the_default_is_about_what_the_default_model_takes_on_two_cores() -> None:
    cost = MockConfig()
    assert cost.duration_s(0, 1, 256) == pytest.approx(0.0113, rel=0.05)
    assert cost.duration_s(0, 8, 8 * 256) == pytest.approx(0.0172, rel=0.1)
    assert cost.duration_s(0, 32, 32 * 256) == pytest.approx(0.0393, rel=0.1)


def test_speedup_divides_and_infinity_is_zero_cost() -> None:
    assert MockConfig(step_s=0.01, prompt_token_s=0.001, speedup=10).duration_s(90, 0, 0) == pytest.approx(0.01)
    assert MockConfig(speedup=inf).duration_s(10_000, 100, 100_000) == 0


@pytest.mark.parametrize(
    "wrong", [{"speedup": 0}, {"step_s": -1}, {"layers": 0}, {"answer_tokens": -1}, {"nonsense": 1}]
)
def test_a_wrong_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        MockConfig(**wrong)
