import math
from typing import Any

import pytest

from components.errors import Rejected
from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.ports import EngineRequest, Phase
from engine.sampling.bounds import check_sampling
from tests.engine.tiny_engine import VOCAB, check_pages, prompt

OUTSIDE: dict[str, list[float]] = {
    "temperature": [-0.1, 101],
    "top_p": [1.1, -1],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 11],
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 11, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))}, "min_tokens"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
    ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
    ({"logit_bias": ((1, 100.1),)}, "logit_bias"),
    ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
    ({"logit_bias": ((1, -math.inf),)}, "logit_bias"),
    ({"logit_bias": tuple((1, 1.0) for _ in range(1025))}, "logit_bias"),
    ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"stop_token_ids": (1,) * 129}, "stop_token_ids"),
    *(
        ({name: value}, name)
        for name, outside in OUTSIDE.items()
        for value in [*outside, math.nan, math.inf, -math.inf]
    ),
]
GOOD: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 2, "top_p": 0, "top_k": -1, "min_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    {"min_tokens": 10, "max_tokens": 10},
    {"logit_bias": ((0, 100.0), (VOCAB - 1, -100.0)), "stop_token_ids": (VOCAB - 1,)},
    {"logprobs": 20, "prompt_logprobs": 0, "n": 128},
    {"top_k": 10**6, "seed": -(2**63)},
]


@pytest.mark.parametrize(("params", "named"), BAD)
def test_what_is_out_of_bounds_is_refused_by_name(engine: EngineCore, params: dict[str, Any], named: str) -> None:
    with pytest.raises(Rejected, match=named) as caught:
        engine.submit(EngineRequest("r", prompt(5), SamplingParams(**{"max_tokens": 20, **params})))
    assert caught.value.fields["param"] == named
    assert not engine.has_work()
    check_pages(engine)


@pytest.mark.parametrize("params", GOOD)
def test_what_is_within_bounds_is_taken(params: dict[str, Any]) -> None:
    check_sampling(SamplingParams(**{"max_tokens": 20, **params}), VOCAB, frozenset({5}))


def test_min_tokens_count_what_was_generated_before_a_move() -> None:
    check_sampling(SamplingParams(max_tokens=2, min_tokens=5), VOCAB, frozenset(), num_generated=3)
    with pytest.raises(Rejected, match="min_tokens"):
        check_sampling(SamplingParams(max_tokens=2, min_tokens=6), VOCAB, frozenset(), num_generated=3)


@pytest.mark.parametrize("num_generated", [-1, 5, 6])
def test_an_answer_is_shorter_than_the_tokens_given(engine: EngineCore, num_generated: int) -> None:
    with pytest.raises(Rejected, match="num_generated"):
        engine.submit(EngineRequest("r", prompt(5), SamplingParams(max_tokens=2), num_generated=num_generated))


def test_logprobs_of_a_prompt_that_is_computed_elsewhere_are_refused(engine: EngineCore) -> None:
    with pytest.raises(Rejected, match="prompt_logprobs"):
        engine.submit(EngineRequest("r", prompt(5), SamplingParams(max_tokens=2, prompt_logprobs=1), Phase.DECODE))
