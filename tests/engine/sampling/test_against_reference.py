"""Every parameter, compared with a second implementation, in batches of random rows."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from components.wire.sampling import SamplingParams
from engine.sampling.adjust import Adjustments
from engine.sampling.drawing import Distances, drawing_of, kept
from engine.sampling.row import Row
from tests.engine.sampling.reference import adjusted, engines_sampler, make_row, probabilities, sample, scores

VOCAB = 24
EOS = frozenset({3})
NEARLY = (1, 1 - 1e-6, 1 + 1e-6)  # shares are rounded
# steps of 1/8: ties as in bf16, and no dependence on the last bit of a float32
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    def often(neutral: float, others: st.SearchStrategy[float]) -> float:
        return draw(st.just(neutral) | others)

    bias = draw(st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.5, 0.5, 100.0]), max_size=3))
    return SamplingParams(
        max_tokens=100,
        temperature=often(0.0, st.sampled_from([0.05, 0.5, 1.0, 2.0])),
        top_p=often(1.0, st.sampled_from([0.01, 0.37, 0.81, 0.97])),
        top_k=int(often(0, st.integers(-1, VOCAB + 5))),
        min_p=often(0.0, st.sampled_from([0.013, 0.21, 0.77, 1.0])),
        presence_penalty=often(0.0, st.sampled_from([-2.0, 0.5, 2.0])),
        frequency_penalty=often(0.0, st.sampled_from([-1.0, 0.25, 2.0])),
        repetition_penalty=often(1.0, st.sampled_from([0.5, 1.25, 2.0])),
        logit_bias=tuple(bias.items()),
        min_tokens=int(often(0, st.integers(0, 14))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], Row]:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    return draw(LOGITS), Row(draw(params()), [*prompt, *draw(TOKENS)], len(prompt), EOS)


def split(row: Row) -> tuple[list[int], list[int]]:
    return list(row.tokens[: row.start]), list(row.tokens[row.start :])


def expected_logits(logits: list[float], row: Row) -> list[float]:
    ends = {*row.params.stop_token_ids, *(() if row.params.ignore_eos else EOS)}
    return adjusted(logits, row.params, *split(row), sorted(ends))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(cases(), min_size=1, max_size=6))
def test_logits_are_adjusted_as_the_reference_does(batch: list[tuple[list[float], Row]]) -> None:
    tensor = torch.tensor([logits for logits, _ in batch])
    Adjustments([row for _, row in batch], VOCAB).apply(tensor)
    for found, (logits, row) in zip(tensor, batch, strict=True):
        np.testing.assert_allclose(found.numpy(), expected_logits(logits, row), rtol=1e-5, atol=1e-5)


def possible(values: list[float], how: SamplingParams) -> list[list[float]]:
    """Return the probabilities of the tokens, also with slightly different top_p and min_p."""
    ways = [(how.top_p * more, how.min_p * other) for more in NEARLY for other in NEARLY]
    changed = [structs.replace(how, top_p=min(top_p, 1.0), min_p=min(min_p, 1.0)) for top_p, min_p in ways]
    return [probabilities(values, way) for way in changed]


@settings(max_examples=150, deadline=None)
@given(LOGITS, params().filter(lambda how: how.temperature > 0))
def test_distributions_are_cut_as_the_reference_does(logits: list[float], how: SamplingParams) -> None:
    row = np.array(logits, dtype=np.float32)
    drawing = drawing_of(how)
    found = set(kept(Distances(row, row.max(), drawing)).tolist())
    assert found in [{token for token, p in enumerate(probs) if p > 0} for probs in possible(logits, how)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(cases(), min_size=1, max_size=6))
def test_tokens_are_those_of_the_reference(batch: list[tuple[list[float], Row]]) -> None:
    found = sample(torch.tensor([logits for logits, _ in batch]), [row for _, row in batch])
    for token, (logits, row) in zip(found, batch, strict=True):
        values = expected_logits(logits, row)
        if row.params.temperature == 0:
            assert values[token] >= max(values) - 1e-5
            continue
        ways = [scores(probs, row.params.seed, len(row.tokens)) for probs in possible(values, row.params)]
        assert any(token in way and way[token] >= max(way.values()) - 1e-3 for way in ways)


@settings(max_examples=50, deadline=None)
@given(st.lists(cases(), min_size=2, max_size=6))
def test_a_row_is_sampled_as_if_it_were_alone(batch: list[tuple[list[float], Row]]) -> None:
    together = sample(torch.tensor([logits for logits, _ in batch]), [row for _, row in batch])
    told = [row.logprobs for _, row in batch]
    for i, (logits, row) in enumerate(batch):
        again = Row(row.params, row.tokens, row.start, EOS)
        assert sample(torch.tensor([logits]), [again]) == [together[i]]
        assert again.logprobs == told[i]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), params(), TOKENS.filter(bool))
def test_counts_that_grow_are_those_counted_at_once(seed: int, how: SamplingParams, prompt: list[int]) -> None:
    steps = np.random.default_rng(seed).integers(-40, 41, (30, VOCAB)) / 8  # drawn one by one they take seconds
    tokens = list(prompt)
    row, sampler = Row(how, tokens, len(prompt), EOS), engines_sampler()
    for logits in steps.tolist():
        fresh = Row(how, list(tokens), len(prompt), EOS)
        (token,) = sample(torch.tensor([logits]), [row], sampler)
        assert sample(torch.tensor([logits]), [fresh]) == [token]
        tokens.append(token)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 20))
def test_logprobs_are_of_the_raw_logits(case: tuple[list[float], Row], count: int) -> None:
    logits, row = case
    row = make_row(row.tokens, row.start, logprobs=count, logit_bias=((7, 100.0),), presence_penalty=2.0)
    (token,) = sample(torch.tensor([logits]), [row])
    raw = np.array(logits) - np.log(np.sum(np.exp(np.array(logits))))
    assert row.logprobs is not None
    np.testing.assert_allclose(row.logprobs.logprob, raw[token], atol=1e-5)
    assert len(row.logprobs.top) == count
    assert len({other for other, _ in row.logprobs.top}) == count
    np.testing.assert_allclose([p for _, p in row.logprobs.top], sorted(raw, reverse=True)[:count], atol=1e-5)
    for other, logprob in row.logprobs.top:
        np.testing.assert_allclose(logprob, raw[other], atol=1e-5)
