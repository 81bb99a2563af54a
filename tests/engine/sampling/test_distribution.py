"""Sampled tokens follow the exact distribution: chi-square tests with fixed seeds."""

from collections import Counter
from typing import Any

import pytest
import torch

from components.wire.sampling import SamplingParams
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.sampling.reference import adjusted, make_row, probabilities, sample
from tests.engine.tiny_engine import make_engine, prompt, run

VOCAB = 40
DRAWS = 20_000


def critical(freedom: int) -> float:
    """Return the bound of 99.9 % of chi-square values. Source: Wilson and Hilferty 1931."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_follows(found: Counter[int], probs: list[float]) -> None:
    draws = found.total()
    assert all(probs[token] > 0 for token in found), "a token that has no probability"
    expected = [p * draws for p in probs if p > 0]
    counted = [found[token] for token, p in enumerate(probs) if p > 0]
    rare = [i for i, number in enumerate(expected) if number < 5]  # pooled, as chi-square requires
    pooled = [(counted[i], expected[i]) for i in range(len(expected)) if i not in rare]
    if sum(expected[i] for i in rare) >= 1:
        pooled.append((sum(counted[i] for i in rare), sum(expected[i] for i in rare)))
    assert len(pooled) > 1, "nothing to test"
    assert sum((have - want) ** 2 / want for have, want in pooled) < critical(len(pooled) - 1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.05, "temperature": 1.4},
        {"logit_bias": ((3, 2.0), (7, -100.0))},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.7},
        {"min_tokens": 50, "stop_token_ids": (1, 2, 3)},
    ],
    ids=lambda params: ",".join(params) or "plain",
)
def test_draws_at_many_positions_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    text, generated = [4, 5, 4, 9], [9, 11, 11, 30]
    whole = SamplingParams(max_tokens=100, **params)
    rows = [make_row([*text, *generated], len(text), seed=seed, **params) for seed in range(DRAWS)]
    found = Counter(sample(logits.expand(DRAWS, -1).clone(), rows))
    values = adjusted(logits.tolist(), whole, text, generated, list(whole.stop_token_ids))
    assert_follows(found, probabilities(values, whole))


def test_positions_of_one_seed_are_as_random_as_seeds() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    rows = [make_row(range(position), seed=8) for position in range(DRAWS)]
    found = Counter(sample(logits.expand(DRAWS, -1).clone(), rows))
    assert_follows(found, probabilities(logits.tolist(), SamplingParams(max_tokens=100)))


def test_first_tokens_of_an_engine_follow_the_model(tiny: LoadedModel) -> None:
    """3,000 requests and 3,000 branches, each with its own seed."""
    logits = logits_after(tiny, prompt(5))
    how = {"temperature": 3.0, "top_k": 20}
    singles = run(
        make_engine(tiny, max_running=32),
        [EngineRequest(f"r{seed}", prompt(5), SamplingParams(max_tokens=1, seed=seed, **how)) for seed in range(3000)],
    )
    probs = probabilities(logits, SamplingParams(max_tokens=1, **how))
    assert_follows(Counter(tokens[0] for tokens in singles.tokens.values()), probs)
    branched = run(
        make_engine(tiny, max_running=32),
        [
            EngineRequest(f"r{seed}", prompt(5), SamplingParams(max_tokens=1, seed=seed, n=30, **how))
            for seed in range(100)
        ],
    )
    firsts = Counter(tokens[0] for tokens in [*branched.tokens.values(), *branched.branches.values()])
    assert firsts.total() == 3000
    assert_follows(firsts, probs)


def logits_after(tiny: LoadedModel, token_ids: list[int]) -> list[float]:
    """Return the model's logits plus a constant, from raw logprobs: a bias makes each token the answer once."""
    found: dict[int, float] = {}
    engine = make_engine(tiny)
    for token in range(tiny.vocab_size):
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=0, logit_bias=((token, 100.0),))
        engine.submit(EngineRequest(f"t{token}", token_ids, params))
    while engine.has_work():
        for output in engine.step().tokens:
            assert output.logprobs is not None
            found[output.token_ids[0]] = output.logprobs[0].logprob
    assert len(found) == tiny.vocab_size
    return [found[token] for token in range(tiny.vocab_size)]
