"""NaN or infinite logits fail their own request, and no other of the batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec import structs

from components.errors import NonFiniteLogits, reported
from components.openai.errors import from_mesh
from components.wire.refused import raised, refusal
from components.wire.sampling import SamplingParams, branch_seed
from engine.attention.backend import StepAttention
from engine.build import assemble
from engine.compilation.forward import EagerForward
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from tests.engine.embedding_model import SIZE, save_embedding_model
from tests.engine.sampling.reference import make_row, sample
from tests.engine.tiny_engine import (
    VOCAB,
    Seen,
    alone,
    cached_blocks,
    check_pages,
    greedy,
    load_tiny,
    peek,
    prompt,
    run,
    run_until_idle,
    small,
)

pytestmark = pytest.mark.usefixtures("pipeline")

LONG = 30  # tokens of the victim's prompt: rows go by context, so it is always the last of its step


class Even:
    """Allows tokens with even ids."""

    is_complete = False
    fault: str | None = None

    def fill(self, allowed: npt.NDArray[np.int32]) -> None:
        allowed[:] = 0x55555555

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0

    def allows(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def fork(self) -> "Even":
        return Even()


class Breaking:
    """A forward whose step `at` returns `value` as the logit of `token`, or of all, in its last row."""

    kind = EagerForward.kind

    def __init__(self, loaded: LoadedModel, at: int, value: float, token: int | None) -> None:
        self._eager = EagerForward(loaded.module)
        self._where = slice(None) if token is None else token
        self._value = value
        self._left = at

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        assert 0 <= int(ids.min()) <= int(ids.max()) < VOCAB, "an id that no embedding has"
        logits = self._eager(ids, positions, keep, step)
        if self._left == 0:
            logits[-1, self._where] = self._value
        self._left -= 1
        return logits


def broken_at(loaded: LoadedModel, at: int, value: float = float("nan"), token: int | None = None) -> EngineCore:
    return assemble(loaded, small(), Breaking(loaded, at, value, token))


def others() -> list[EngineRequest]:
    return [
        EngineRequest(
            f"o{i}", prompt(4 + i, start=i), SamplingParams(max_tokens=12, temperature=0.5 * i, seed=i, ignore_eos=True)
        )
        for i in range(3)
    ]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "cut": {"top_p": 0.9, "top_k": 9},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 1.0},
    "biased, with log-probabilities": {"temperature": 0, "logit_bias": ((7, 5.0),), "logprobs": 3},
}


@pytest.mark.parametrize("token", [None, 7], ids=["a whole row", "one token"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_only_the_request_whose_logits_are_not_finite_fails(
    tiny: LoadedModel, how: dict[str, Any], value: float, token: int | None
) -> None:
    """A sampled NaN became an id beyond the vocabulary, which failed the whole batch in the next step."""
    core = broken_at(tiny, 3, value, token)
    seen = run(
        core, [*others(), EngineRequest("r", prompt(LONG), SamplingParams(max_tokens=20, **how, ignore_eos=True))]
    )
    assert list(seen.failed) == ["r"]
    assert type(seen.failed["r"].error) is NonFiniteLogits
    assert seen.tokens["r"] == alone(tiny, prompt(LONG), SamplingParams(max_tokens=20, **how, ignore_eos=True))[:3]
    for other in others():
        assert seen.tokens[other.request_id] == alone(tiny, other.token_ids, other.sampling)


def test_a_masked_request_fails_alone_and_its_mask_is_not_told(tiny: LoadedModel) -> None:
    for params in (greedy(20, ignore_eos=True), SamplingParams(max_tokens=20, ignore_eos=True)):
        request = EngineRequest("r", prompt(LONG), params, mask=Even())
        seen = run(broken_at(tiny, 3), [*others(), request])
        assert list(seen.failed) == ["r"]
        assert len(seen.tokens["r"]) == 3
        assert all(len(seen.tokens[other.request_id]) == 12 for other in others())


def test_pages_of_a_broken_request_are_found_by_no_other(tiny: LoadedModel) -> None:
    """Their KV may be broken, and would break each request that shares the prefix."""
    core = broken_at(tiny, 3)
    seen = run(core, [EngineRequest("r", prompt(LONG), greedy(20, ignore_eos=True))])
    assert list(seen.failed) == ["r"]
    assert peek(core, prompt(LONG)) == 0
    assert core.step().stats.held_pages == 0
    again = run(core, [EngineRequest("r", prompt(LONG), greedy(20, ignore_eos=True))])
    assert again.tokens["r"] == alone(tiny, prompt(LONG), greedy(20, ignore_eos=True))


def test_all_branches_end_with_the_broken_one_and_it_is_told_once(tiny: LoadedModel) -> None:
    core = broken_at(tiny, 4)
    core.submit(EngineRequest("r", prompt(LONG), SamplingParams(max_tokens=20, n=3, ignore_eos=True)))
    told = []
    while core.has_work():
        told += core.step().failed
        check_pages(core)
    assert [failed.request_id for failed in told] == ["r"]
    assert peek(core, prompt(LONG)) == 0, "nor does one of them leave the prompt's pages in the cache"


def test_pages_of_a_broken_request_are_not_published_again_by_another_that_holds_them(tiny: LoadedModel) -> None:
    """Each request publishes its pages again when it ends."""
    core = broken_at(tiny, 4)
    core.submit(EngineRequest("broken", prompt(LONG), greedy(20, ignore_eos=True)))
    core.step()
    core.step()
    core.submit(EngineRequest("shares", prompt(LONG), greedy(60, ignore_eos=True)))
    seen = Seen()
    while not seen.failed:
        seen.take(core.step())
    assert list(seen.failed) == ["broken"]
    assert seen.cached["shares"] == 16
    for _ in range(10):  # its second page becomes full; it was computed from the first
        seen.take(core.step())
    core.cancel("shares")
    run_until_idle(core, seen)
    assert peek(core, prompt(LONG)) == 0
    assert not cached_blocks(core)
    run(core, [EngineRequest("again", prompt(LONG), greedy(2))])
    assert peek(core, prompt(LONG)) == 16, "pages that are free again may be published"


def sampled_twice(tiny: LoadedModel, length: int = LONG) -> tuple[SamplingParams, list[int], list[int]]:
    """Parameters of a request with two branches, and the tokens of both."""
    params = SamplingParams(max_tokens=20, seed=3, n=2, ignore_eos=True)
    seeds = (branch_seed(params.seed, branch) for branch in range(2))
    first, second = (alone(tiny, prompt(length), structs.replace(params, n=1, seed=seed)) for seed in seeds)
    return params, first, second


def test_a_branch_that_breaks_at_once_leaves_no_pages_of_a_prompt_whose_first_branch_is_over(tiny: LoadedModel) -> None:
    """Only the first branch, which had ended, counted as the publisher of the prompt's pages."""
    params, first, second = sampled_twice(tiny)
    assert first[0] != second[0]
    core = broken_at(tiny, 1)
    seen = run(core, [EngineRequest("r", prompt(LONG), structs.replace(params, stop_token_ids=(first[0],)))])
    assert seen.tokens["r"] == first[:1]
    assert list(seen.failed) == ["r"]
    assert not cached_blocks(core)


@pytest.mark.parametrize("length", [LONG, 16])  # of 16 tokens no page is shared: the full one is copied
def test_a_branch_that_ended_in_flight_does_not_publish_the_prompt_of_a_broken_one(
    tiny: LoadedModel, length: int
) -> None:
    """It frees its pages at the end of the step, after the other branch had unpublished them."""
    params, first, second = sampled_twice(tiny, length)
    assert second[1] not in {*first[:4], second[0]}
    core = broken_at(tiny, 3)
    seen = run(core, [EngineRequest("r", prompt(length), structs.replace(params, stop_token_ids=(second[1],)))])
    assert seen.branches["r", 1] == second[:2]
    assert seen.tokens["r"] == first[:3]
    assert list(seen.failed) == ["r"]
    assert not cached_blocks(core)


def test_a_prefill_fails_and_its_pages_wait_for_their_release(tiny: LoadedModel) -> None:
    core = broken_at(tiny, 0)
    seen = run(core, [EngineRequest("r", prompt(LONG), greedy(20), Phase.PREFILL)])
    assert list(seen.failed) == ["r"]
    assert core.step().stats.num_held == 1
    core.release("r")
    assert core.step().stats.held_pages == 0


def test_prompt_logprobs_that_are_no_numbers_fail_the_request(tiny: LoadedModel) -> None:
    """JSON has no NaN. Here the first chunk of the prompt breaks, without a draw."""
    core = assemble(tiny, small(max_step_tokens=18), Breaking(tiny, 0, float("nan"), None))
    seen = run(core, [EngineRequest("r", prompt(LONG), greedy(3, prompt_logprobs=1))])
    assert list(seen.failed) == ["r"]
    assert "r" not in seen.tokens


def test_a_vector_that_is_not_finite_fails_its_text(tmp_path: Path) -> None:
    loaded = load_tiny(save_embedding_model(tmp_path / "embed", "lasttoken"))
    core = assemble(loaded, small(), Breaking(loaded, 0, float("nan"), None))
    for name, length in (("good", 9), ("bad", 20)):
        core.submit(EngineRequest(name, list(range(3, 3 + length)), greedy(1), Phase.EMBED))
    output = core.step()
    seen = run_until_idle(core, Seen())
    embedded = {done.request_id: np.frombuffer(done.vector, "<f4") for done in output.embedded}
    assert {*seen.failed, *(failed.request_id for failed in output.failed)} == {"bad"}
    if embedded:  # with a pipeline the second step tells
        assert list(embedded) == ["good"]
        assert np.isfinite(embedded["good"]).all()
        assert embedded["good"].shape == (SIZE,)


def test_tokens_that_never_come_are_no_defect() -> None:
    """Masks write logits of -inf, as do some models."""
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 9] = 0.0
    rows = [make_row([1], temperature=0.0), make_row([1])]
    assert sample(logits.clone(), rows) == [9, 9]
    logits[:, 9] = -torch.inf
    assert sample(logits, [rows[0]] * 2) == [0, 0]


def test_the_client_is_told_what_happened() -> None:
    error = raised(refusal(NonFiniteLogits("here", request_id="r")))
    assert type(error) is NonFiniteLogits
    assert reported("NonFiniteLogits") is NonFiniteLogits
    told = from_mesh(error, "r")
    assert (told.status, told.code) == (500, "non_finite_logits")
    assert "NaN or infinite" in told.message
