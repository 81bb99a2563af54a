import pytest
import torch

from engine.model.load import LoadedModel
from engine.ports import EngineRequest, SamplingParams
from engine.sampling.branches import branch_seed
from engine.sampling.row import Row
from engine.sampling.seeds import uniform
from tests.engine.sampling.reference import make_row, sample
from tests.engine.tiny_engine import alone, make_engine, prompt, run

VOCAB = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(position: int, **params: float) -> Row:
    return make_row(range(position), **params)


def test_draws_are_uniform_and_depend_on_seed_and_position_alone() -> None:
    draws = torch.tensor([uniform(3, position) for position in range(4000)], dtype=torch.float64)
    assert draws.tolist() == [uniform(3, position) for position in range(4000)]
    assert 0 <= draws.min() < draws.max() < 1
    assert torch.histc(draws, 10, 0, 1).sub(400).abs().max() < 80
    assert len({uniform(seed, 5) for seed in range(100)}) == 100


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 + 5, 0])
def test_every_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1


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


def test_samples_follow_the_distribution() -> None:
    logits = logits_of(1)
    number = 20_000
    tokens = sample(logits.expand(number, -1).clone(), [draw(p, temperature=0.8, seed=1) for p in range(number)])
    expected = (logits[0] / 0.8).softmax(-1) * number
    found = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
    # five standard deviations of each count
    assert ((found - expected).abs() <= 5 * expected.sqrt() + 3).all()


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    number = 2000

    def drawn(top_p: float) -> set[int]:
        return set(sample(logits.expand(number, -1).clone(), [draw(p, top_p=top_p) for p in range(number)]))

    assert drawn(0.4) == {0}
    assert drawn(0.6) == {0, 1}
    assert drawn(0.9) == {0, 1, 2}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_a_tiny_temperature_is_almost_greedy_and_not_a_number_of_nothing() -> None:
    logits = logits_of(3)
    assert sample(logits, [draw(9, temperature=1e-6)] * 3) == logits.argmax(-1).tolist()


def test_a_seeded_request_gives_the_same_tokens_whatever_else_is_in_the_batch(tiny: LoadedModel) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    others = [
        EngineRequest(f"o{i}", prompt(9 + 7 * i, start=i), SamplingParams(40, temperature=0.3 * i, seed=i))
        for i in range(7)
    ]
    seen = run(make_engine(tiny), [*others, EngineRequest("r", prompt(21), params)])
    assert seen.tokens["r"] == alone(tiny, prompt(21), params)


def test_seeds_give_different_texts(tiny: LoadedModel) -> None:
    texts = {
        tuple(alone(tiny, prompt(21), SamplingParams(12, temperature=1.0, seed=seed, ignore_eos=True)))
        for seed in range(5)
    }
    assert len(texts) == 5
