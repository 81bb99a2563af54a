import random
from typing import Any

import torch

from components.wire.sampling import SamplingParams, branch_seed
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from engine.sampling.row import Row
from tests.engine.sampling.reference import engines_sampler, make_row, sample
from tests.engine.tiny_engine import alone, make_engine, prompt, run

VOCAB = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(position: int, **params: float) -> Row:
    return make_row(range(position), **params)


def test_parameters_and_counts_are_kept_while_the_batch_is_the_same_and_no_longer() -> None:
    """Rows come, go and change places; each is sampled as by a new sampler."""
    chance = random.Random(0)
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "top_p": 0.7, "logprobs": 2},
        {"seed": 3, "top_k": 5, "temperature": 0.6},
        {"seed": 4, "min_p": 0.1, "frequency_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": -1.0},
        {"seed": 5, "repetition_penalty": 0.8, "min_tokens": 30, "stop_token_ids": (3, 4)},
        {"seed": 6, "logit_bias": ((3, 4.0), (9, -5.0))},
    ]
    sampler = engines_sampler()
    texts: list[tuple[list[int], dict[str, Any]]] = []
    rows: list[Row] = []
    for step in range(300):
        if chance.random() < 0.15 or not rows:
            texts.append(([chance.randrange(VOCAB) for _ in range(chance.randrange(1, 90))], chance.choice(ways)))
            rows.append(make_row(texts[-1][0], **texts[-1][1]))
        if chance.random() < 0.1 and len(rows) > 1:
            gone = chance.randrange(len(rows))
            del texts[gone], rows[gone]
        logits = logits_of(len(rows), step)
        drawn = sample(logits.clone(), rows, sampler)
        fresh = [make_row(list(tokens), row.start, **how) for (tokens, how), row in zip(texts, rows, strict=True)]
        assert drawn == sample(logits, fresh)
        for (tokens, _), token in zip(texts, drawn, strict=True):
            tokens.append(token)


def test_a_text_may_outgrow_the_room_that_its_penalties_were_given() -> None:
    """Every token is drawn once, since it is then forbidden; two rows are new in turn."""
    sampler = engines_sampler()
    texts: list[list[int]] = [[1], [2]]
    rows = [make_row(text, temperature=0, presence_penalty=2.0, repetition_penalty=10) for text in texts]
    for _ in range(2 * VOCAB):
        drawn = sample(torch.linspace(1, 1.5, VOCAB).repeat(2, 1), rows, sampler)
        for text, token in zip(texts, drawn, strict=True):
            text.append(token)
    assert [len(set(text[1 : VOCAB + 1])) for text in texts] == [VOCAB, VOCAB]


def test_branches_have_seeds_of_their_own_and_the_first_its_request_s() -> None:
    seeds = [branch_seed(seed, branch) for seed in (-1, 0, 1, 2**63) for branch in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert branch_seed(-7, 0) == -7
    assert all(0 <= branch_seed(-7, branch) < 2**64 for branch in range(1, 9))


def test_temperature_zero_is_the_largest_logit() -> None:
    logits = logits_of(4)
    assert sample(logits, [draw(0, temperature=0)] * 4) == logits.argmax(-1).tolist()


def test_a_row_is_sampled_as_if_it_were_alone() -> None:
    logits = logits_of(5)
    rows = [
        draw(3, temperature=0),
        draw(4, temperature=0.7, seed=1),
        draw(5, temperature=1.3, top_p=0.5, seed=2),
        draw(6, temperature=1.0, top_p=0.01, seed=3),
        draw(7, temperature=2.0, seed=4),
    ]
    assert sample(logits, rows) == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(5)]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    number = 300

    def drawn(top_p: float) -> set[int]:
        return set(sample(logits.expand(number, -1).clone(), [draw(p, top_p=top_p) for p in range(number)]))

    assert drawn(0.0) == drawn(0.4) == {0}
    assert drawn(0.6) == {0, 1}
    assert drawn(0.9) == {0, 1, 2}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_a_tiny_temperature_is_almost_greedy_and_not_a_number_of_nothing() -> None:
    logits = logits_of(3)
    assert sample(logits, [draw(9, temperature=1e-6)] * 3) == logits.argmax(-1).tolist()


def test_a_seeded_request_gives_the_same_tokens_whatever_else_is_in_the_batch(tiny: LoadedModel) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    others = [
        EngineRequest(f"o{i}", prompt(9 + 7 * i, start=i), SamplingParams(max_tokens=40, temperature=0.3 * i, seed=i))
        for i in range(7)
    ]
    seen = run(make_engine(tiny), [*others, EngineRequest("r", prompt(21), params)])
    assert seen.tokens["r"] == alone(tiny, prompt(21), params)


def test_seeds_give_different_texts(tiny: LoadedModel) -> None:
    texts = {
        tuple(alone(tiny, prompt(21), SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)))
        for seed in range(5)
    }
    assert len(texts) == 5
