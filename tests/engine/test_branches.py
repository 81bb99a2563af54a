"""n > 1: branches of one prompt, their pages and their ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from components.errors import Rejected
from components.wire.sampling import SamplingParams, branch_seed
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, FinishReason, Phase
from tests.engine.tiny_engine import (
    Seen,
    alone,
    check_pages,
    greedy,
    make_engine,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")


def sampled(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 1.5, "seed": 9, "ignore_eos": True, **changes})


def all_branches(seen: Seen, request_id: str, n: int) -> list[list[int]]:
    return [seen.tokens[request_id], *(seen.branches[request_id, branch] for branch in range(1, n))]


def separately(tiny: LoadedModel, token_ids: list[int], params: SamplingParams) -> list[list[int]]:
    """The same as requests of their own, with the derived seeds."""
    return [
        alone(tiny, token_ids, replace(params, n=1, seed=branch_seed(params.seed, branch)))
        for branch in range(params.n)
    ]


@pytest.mark.parametrize("length", [1, 16, 33])
def test_branches_are_requests_with_derived_seeds(tiny: LoadedModel, length: int) -> None:
    params = sampled(12, n=4, presence_penalty=0.5)
    engine = make_engine(tiny)
    found = all_branches(run(engine, [EngineRequest("r", prompt(length), params)]), "r", 4)
    assert found == separately(tiny, prompt(length), params)
    assert len({tuple(tokens) for tokens in found}) == 4
    assert engine.step().stats.held_pages == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_full_pages_are_shared_and_those_of_the_last_two_tokens_are_each_branch_s_own(
    tiny: LoadedModel, length: int
) -> None:
    engine = make_engine(tiny)
    engine.submit(EngineRequest("r", prompt(length), sampled(40, n=5)))
    while not engine._requests._branches:
        engine.step()
    check_pages(engine)
    tables = [request.pages for request in engine._requests]
    shared = max(0, length - 2) // 16
    own = 5 * (-(-length // 16) - shared)
    assert len(tables) == 5
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    assert len({page for table in tables for page in table}) == shared + own
    assert engine._memory.pool.num_held == shared + own
    assert all(engine._memory.pool._holders[page] == 5 for page in tables[0][:shared])


@pytest.mark.parametrize(("pool", "max_running"), [(10, 16), (14, 2)])
def test_branches_for_which_there_is_no_room_wait_and_are_preempted_like_others(
    tiny: LoadedModel, pool: int, max_running: int
) -> None:
    params = sampled(40, n=5)
    engine = make_engine(tiny, num_pages=pool, max_running=max_running, max_step_tokens=40, reserve_tokens=0)
    asked = [EngineRequest("a", prompt(33), params), EngineRequest("b", prompt(20, start=2), sampled(30, n=3))]
    seen = run(engine, asked)
    assert all_branches(seen, "a", 5) == separately(tiny, prompt(33), params)
    assert all_branches(seen, "b", 3) == separately(tiny, prompt(20, start=2), sampled(30, n=3))
    assert engine.step().stats.held_pages == 0
    if max_running > 2:
        assert seen.steps[-1].preemptions > 0


def test_every_branch_ends_for_itself(tiny: LoadedModel) -> None:
    params = sampled(30, n=6, ignore_eos=False, stop_token_ids=tuple(range(20, 40)))
    engine = make_engine(tiny)
    seen = run(engine, [EngineRequest("r", prompt(20), params)])
    found = all_branches(seen, "r", 6)
    assert found == separately(tiny, prompt(20), params)
    assert len({len(tokens) for tokens in found}) > 1
    ends = [seen.finish["r"], *(seen.branch_finish["r", branch] for branch in range(1, 6))]
    assert set(ends) <= {FinishReason.STOP, FinishReason.LENGTH}
    engine.submit(EngineRequest("r", prompt(20), params))


def test_one_token_each(tiny: LoadedModel) -> None:
    engine = make_engine(tiny)
    params = sampled(1, n=7)
    seen = run(engine, [EngineRequest("r", prompt(16), params)])
    assert all_branches(seen, "r", 7) == separately(tiny, prompt(16), params)
    assert engine.step().stats.held_pages == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_cancel_ends_every_branch_and_returns_every_page(tiny: LoadedModel, steps: int) -> None:
    engine = make_engine(tiny, max_running=3)
    engine.submit(EngineRequest("r", prompt(60), sampled(40, n=5)))
    engine.submit(EngineRequest("other", prompt(20, start=1), greedy(10)))
    for _ in range(steps):
        engine.step()
    engine.cancel("r")
    check_pages(engine)
    seen = run(engine, [])
    assert not seen.branches
    assert "r" not in seen.tokens
    assert engine.step().stats.held_pages == 0
    engine.submit(EngineRequest("r", prompt(60), sampled(4)))  # the id is free again


def test_an_id_is_taken_until_the_last_branch_is_over(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_running=1)
    engine.submit(EngineRequest("r", prompt(5), sampled(4, n=2)))
    while "r" in engine._requests._live:
        engine.step()
    with pytest.raises(Rejected, match="in use"):
        engine.submit(EngineRequest("r", prompt(5), sampled(4)))
    engine.cancel("r")
    engine.submit(EngineRequest("r", prompt(5), sampled(4)))


@pytest.mark.parametrize("length", [20, 32])
def test_branches_of_a_prompt_that_was_computed_elsewhere(tiny: LoadedModel, length: int) -> None:
    params = sampled(20, n=3)
    prefill, decode = make_engine(tiny), make_engine(tiny)
    computed = prefilled(prefill, "r", prompt(length), params)
    decode.submit(EngineRequest("r", prompt(length), params, Phase.DECODE))
    reserved = decode.step().reserved[0]
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(decode, target, read_page(prefill, source))
    assert computed.first_token is not None
    (first,) = decode.deliver("r", computed.first_token)
    check_pages(decode)
    seen = run(decode, [])
    seen.tokens["r"] = [*first.token_ids, *seen.tokens["r"]]
    assert all_branches(seen, "r", 3) == separately(tiny, prompt(length), params)
    assert sum(stats.prompt_tokens for stats in seen.steps) == 4, "each branch computes the last two tokens"


def test_each_branch_has_a_mask_of_its_own(tiny: LoadedModel) -> None:
    class Countdown:
        """Allows the next lower token."""

        def __init__(self, last: int) -> None:
            self.last = last

        def fill(self, allowed: npt.NDArray[np.int32]) -> None:
            allowed[:] = 0
            allowed[0] = 1 << self.last - 1

        def accept(self, token_id: int) -> None:
            assert token_id == self.last - 1
            self.last = token_id

        def allows(self, token_ids: Sequence[int]) -> int:
            raise AssertionError("nothing is guessed here")

        def fork(self) -> "Countdown":
            return Countdown(self.last)

        is_complete = False
        fault = None

    seen = run(make_engine(tiny), [EngineRequest("r", prompt(20), sampled(6, n=4), mask=Countdown(30))])
    assert all_branches(seen, "r", 4) == [[29, 28, 27, 26, 25, 24]] * 4


def test_logprobs_of_the_prompt_come_with_the_first_branch(tiny: LoadedModel, engine: EngineCore) -> None:
    engine.submit(EngineRequest("r", prompt(40), sampled(3, n=3, logprobs=1, prompt_logprobs=1)))
    outputs = []
    while engine.has_work():
        outputs += engine.step().tokens
    assert all(output.logprobs is not None and len(output.logprobs) == 1 for output in outputs)
    told = [output for output in outputs if output.prompt_logprobs is not None]
    assert [output.branch for output in told] == [0]
    assert len(told[0].prompt_logprobs or []) == 39


@pytest.mark.parametrize("gone", [[0], [2], [0, 1], [3, 0, 1]])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_branch_that_is_cancelled_ends_alone(tiny: LoadedModel, steps: int, gone: list[int]) -> None:
    """Before the prompt is computed, while it is, and while they generate."""
    params = sampled(12, n=4)
    engine = make_engine(tiny, max_step_tokens=24)
    engine.submit(EngineRequest("r", prompt(40), params))
    seen = Seen()
    for _ in range(steps):
        seen.take(engine.step())
    for branch in gone:
        engine.cancel("r", branch)
        check_pages(engine)

    def told(branch: int) -> list[int]:
        return list(seen.branches.get(("r", branch), []) if branch else seen.tokens.get("r", []))

    before = {branch: told(branch) for branch in gone}
    run_until_idle(engine, seen)
    alone_would_say = separately(tiny, prompt(40), params)
    for branch in range(4):
        assert told(branch) == (before[branch] if branch in gone else alone_would_say[branch])
    assert engine.step().stats.held_pages == 0
    engine.submit(EngineRequest("r", prompt(5), sampled(4)))  # the id is free again


def test_the_prompts_shared_pages_come_back_with_the_last_branch(tiny: LoadedModel) -> None:
    engine = make_engine(tiny)
    engine.submit(EngineRequest("r", prompt(33), sampled(40, n=3)))
    while not engine._requests._branches:
        engine.step()
    for left, branch in ((2, 1), (1, 0)):
        engine.cancel("r", branch)
        run_some(engine, 2)
        assert engine._memory.pool.num_held >= 2 + left
        shared = next(iter(engine._requests)).pages[:1]
        assert all(engine._memory.pool._holders[page] == left for page in shared)
    with pytest.raises(Rejected, match="in use"):
        engine.submit(EngineRequest("r", prompt(33), sampled(4)))
    engine.cancel("r", 2)
    run_some(engine, 2)
    assert engine._memory.pool.num_held == 0


def test_a_request_without_any_branch_left_is_over_before_it_began(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=20)
    engine.submit(EngineRequest("r", prompt(60), sampled(40, n=2)))
    engine.step()
    for branch in (1, 1, 7, -1):
        engine.cancel("r", branch)
    engine.cancel("nobody", 0)
    assert "r" in engine._requests
    engine.cancel("r", 0)
    assert not run(engine, []).tokens
    assert engine.step().stats.held_pages == 0


def test_a_delivered_first_token_that_nobody_wants_is_not_told(tiny: LoadedModel) -> None:
    params = sampled(10, n=3)
    prefill, decode = make_engine(tiny), make_engine(tiny)
    computed = prefilled(prefill, "r", prompt(20), params)
    decode.submit(EngineRequest("r", prompt(20), params, Phase.DECODE))
    reserved = decode.step().reserved[0]
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(decode, target, read_page(prefill, source))
    decode.cancel("r", 0)
    decode.cancel("r", 2)
    assert computed.first_token is not None
    assert decode.deliver("r", computed.first_token) == []
    seen = run(decode, [])
    assert seen.branches == {("r", 1): separately(tiny, prompt(20), params)[1]}
    assert not seen.tokens
    assert decode.step().stats.held_pages == 0


def run_some(engine: EngineCore, steps: int) -> None:
    for _ in range(steps):
        engine.step()
        check_pages(engine)
