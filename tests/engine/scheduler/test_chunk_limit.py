"""A prompt beside decodes is computed in chunks that keep the step short, however slow the machine is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from engine.scheduler.step_cost import (
    FIRST_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    MIN_DISAGGREGATED_CHUNK_TOKENS,
    STEPS_IN_MEDIAN,
    ChunkLimit,
    StepCost,
)
from tests.engine.tiny_engine import greedy, make_engine, prompt

TARGET_S = 0.04


class Machine:
    """Steps of known cost, with chunks as the limit allows them."""

    def __init__(self, token_s: float, decode_s: float, stretch: float = 2.0) -> None:
        self.token_s = token_s
        self.decode_s = decode_s
        self.limit = ChunkLimit(TARGET_S, stretch)

    def decode(self, decodes: int = 8, times: int = 1) -> None:
        for _ in range(times):
            self.limit.stepped(0, decodes, self.decode_s)

    def mixed(self, decodes: int = 8, times: int = 1) -> float:
        step_s = 0.0
        for _ in range(times):
            tokens, _ = self.limit.tokens(decodes)
            step_s = self.decode_s + tokens * self.token_s
            self.limit.stepped(tokens, decodes, step_s)
        return step_s


def test_before_anything_is_known_a_chunk_is_short() -> None:
    limit = ChunkLimit(TARGET_S)
    assert limit.tokens(4) == (FIRST_CHUNK_TOKENS, FIRST_CHUNK_TOKENS)
    limit.stepped(0, 4, 0.03)
    assert limit.tokens(4) == (FIRST_CHUNK_TOKENS, FIRST_CHUNK_TOKENS)


@pytest.mark.parametrize("speed", [2000.0, 4000.0, 10_000.0])
def test_a_step_with_a_chunk_takes_the_target(speed: float) -> None:
    machine = Machine(1 / speed, 0.01)
    machine.decode()
    assert machine.mixed(times=STEPS_IN_MEDIAN) == pytest.approx(TARGET_S, rel=0.05)


def test_more_decodes_leave_less_for_the_chunk() -> None:
    limit = ChunkLimit(TARGET_S)
    limit.stepped(0, 1, 0.008)
    limit.stepped(0, 16, 0.018)
    limit.stepped(100, 1, 0.033)
    assert limit.tokens(1) == (128, 128)
    assert limit.tokens(16) == (88, 88)


@pytest.mark.parametrize("stretch", [2.0, 4.0])
def test_prompts_get_their_share_of_the_time_where_decodes_alone_exceed_the_target(stretch: float) -> None:
    """A fixed target would starve prompts on a slow machine or beside many decodes."""
    machine = Machine(token_s=0.001, decode_s=0.1, stretch=stretch)
    machine.decode()
    assert machine.mixed(times=STEPS_IN_MEDIAN) == pytest.approx(stretch * 0.1, rel=0.05)


def test_a_longer_step_than_the_target_is_taken_only_where_decodes_are_slow() -> None:
    machine = Machine(token_s=1 / 4000, decode_s=0.009, stretch=4.0)
    machine.decode()
    assert machine.mixed(times=STEPS_IN_MEDIAN) == pytest.approx(TARGET_S, rel=0.05)


def test_on_a_cpu_a_target_that_was_set_stretches_a_decode_step_less(tiny: LoadedModel) -> None:
    """One second a token: the chunk takes as long as a decode step, and without a setting three times as long."""
    for target_ms, tokens in ((50.0, (40, 40)), (None, (120, 180))):
        engine = make_engine(tiny, max_step_tokens=512, itl_target_ms=target_ms)
        assert engine._chunk_limit is not None
        engine._chunk_limit.stepped(0, 1, 40.0)
        engine._chunk_limit.stepped(80, 1, 120.0)
        assert engine._chunk_limit.tokens(1) == tokens


def test_a_chunk_is_never_so_short_that_steps_cost_more_than_it() -> None:
    limit = ChunkLimit(TARGET_S)
    for _ in range(50):
        limit.stepped(limit.tokens(8)[0], 8, 5.0)
    assert limit.tokens(8)[0] == MIN_CHUNK_TOKENS


@pytest.mark.parametrize(("token_s", "tokens"), [(0.001, 100), (0.01, MIN_DISAGGREGATED_CHUNK_TOKENS)])
def test_beside_disaggregated_streams_a_step_takes_about_twice_as_long_as_without_the_prompt(
    token_s: float, tokens: int
) -> None:
    machine = Machine(token_s, decode_s=0.1, stretch=4.0)
    machine.decode()
    machine.mixed(times=STEPS_IN_MEDIAN)
    assert machine.limit.tokens(8)[0] == pytest.approx(max(MIN_CHUNK_TOKENS, 0.3 / token_s), abs=1)
    assert machine.limit.tokens(8, 1)[0] == pytest.approx(tokens, abs=1)
    assert ChunkLimit(TARGET_S, 4.0).tokens(8, 8)[0] == FIRST_CHUNK_TOKENS


@pytest.mark.parametrize("branches", [1, 3])
def test_streams_whose_prompts_were_computed_elsewhere_are_disaggregated(tiny: LoadedModel, branches: int) -> None:
    engine = make_engine(tiny, max_step_tokens=512)
    seen: list[tuple[int, int]] = []

    def tokens(decodes: int, disaggregated: int = 0) -> tuple[int, int]:
        seen.append((decodes, disaggregated))
        return FIRST_CHUNK_TOKENS, FIRST_CHUNK_TOKENS

    assert engine._chunk_limit is not None
    engine._chunk_limit.tokens = tokens  # type: ignore[method-assign]
    engine.submit(EngineRequest("here", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    sampling = greedy(20, ignore_eos=True, n=branches)
    engine.submit(EngineRequest("elsewhere", prompt(9, start=1), sampling, Phase.DECODE))
    engine.step()
    assert seen[-1] == (1, 0), "it has pages, and waits for its KV"
    engine.deliver("elsewhere", 7)
    while seen[-1][0] <= branches:
        engine.step()
    assert seen[-1] == (1 + branches, branches)


def test_a_prompt_that_is_computed_here_after_a_failed_transfer_is_not(tiny: LoadedModel) -> None:
    engine = make_engine(tiny)
    engine.submit(EngineRequest("r", prompt(9), greedy(3, ignore_eos=True), Phase.DECODE))
    engine.step()
    engine.recompute("r", 7)
    engine.step()
    assert not any(request.disaggregated for request in engine._scheduler.running)


def test_one_slow_step_changes_nothing() -> None:
    machine = Machine(1 / 4000, 0.01)
    machine.decode(times=STEPS_IN_MEDIAN)
    machine.mixed(times=STEPS_IN_MEDIAN)
    tokens = machine.limit.tokens(8)
    machine.limit.stepped(tokens[0], 8, 2.0)
    machine.limit.stepped(0, 8, 2.0)
    assert machine.limit.tokens(8) == tokens


def test_it_follows_a_machine_that_gets_busy_and_is_left_alone_again() -> None:
    machine = Machine(1 / 4000, 0.01)
    for factor in (1, 4, 1):
        machine.token_s, machine.decode_s = factor / 4000, factor * 0.01
        machine.decode(times=STEPS_IN_MEDIAN)
        step_s = machine.mixed(times=STEPS_IN_MEDIAN)
        assert step_s == pytest.approx(max(TARGET_S, 2 * machine.decode_s), rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(0, 512), st.integers(0, 64), st.floats(0, 100, allow_nan=False)), min_size=1, max_size=60
    ),
    st.floats(0.001, 10),
    st.integers(1, 64),
)
def test_whatever_was_measured_a_chunk_has_enough_tokens(
    steps: list[tuple[int, int, float]], target_s: float, decodes: int
) -> None:
    limit = ChunkLimit(target_s, overrun=1.5)
    for step in steps:
        limit.stepped(*step)
    tokens, completing = limit.tokens(decodes)
    assert MIN_CHUNK_TOKENS <= tokens <= completing
    disaggregated, completing = limit.tokens(decodes, decodes)
    assert MIN_DISAGGREGATED_CHUNK_TOKENS <= disaggregated == completing <= tokens


def test_an_unknown_number_of_decodes_costs_as_much_as_the_most_similar_one() -> None:
    cost = StepCost()
    assert cost.decode_s(3) == 0.0
    cost.stepped(0, 2, 0.01)
    cost.stepped(0, 32, 0.03)
    assert cost.decode_s(1) == cost.decode_s(5) == 0.01
    assert cost.decode_s(64) == 0.03


def test_a_long_prompt_is_cut_beside_decodes_and_not_when_it_is_alone(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=512)
    engine.submit(EngineRequest("alone", prompt(FIRST_CHUNK_TOKENS + 72), greedy(1)))
    assert engine.step().stats.prompt_tokens == FIRST_CHUNK_TOKENS + 72
    engine = make_engine(tiny, max_step_tokens=512)
    engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    engine.submit(EngineRequest("reads", prompt(FIRST_CHUNK_TOKENS + 72, start=1), greedy(1)))
    assert engine.step().stats.prompt_tokens == FIRST_CHUNK_TOKENS


def test_a_target_of_zero_limits_nothing(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=512, itl_target_ms=0)
    engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    engine.submit(EngineRequest("reads", prompt(FIRST_CHUNK_TOKENS + 72, start=1), greedy(1)))
    assert engine.step().stats.prompt_tokens == FIRST_CHUNK_TOKENS + 72


def test_a_chunk_may_exceed_its_limit_to_complete_the_first_prompt_of_a_step(tiny: LoadedModel) -> None:
    for length, expected in ((90, [90]), (91, [60, 31]), (150, [60, 90]), (120, [60, 60]), (30, [30])):
        engine = make_engine(tiny, max_step_tokens=512)
        assert engine._chunk_limit is not None
        engine._chunk_limit.tokens = lambda *_: (60, 90)  # type: ignore[method-assign]
        engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
        engine.step()
        engine.submit(EngineRequest("reads", prompt(length, start=1), greedy(1)))
        seen: list[int] = []
        while sum(seen) < length:
            seen.append(engine.step().stats.prompt_tokens)
        assert seen == expected


def test_a_second_prompt_of_a_step_does_not_exceed_the_limit(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=512)
    assert engine._chunk_limit is not None
    engine._chunk_limit.tokens = lambda *_: (60, 90)  # type: ignore[method-assign]
    engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    for name in ("first", "second"):
        engine.submit(EngineRequest(name, prompt(45, start=len(name)), greedy(1)))
    assert [engine.step().stats.prompt_tokens for _ in range(2)] == [60, 30]


def test_a_chunk_that_log_probabilities_keep_from_completing_its_prompt_does_not_raise_the_limit(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt of the step used the tokens that were meant to complete the first one."""
    monkeypatch.setattr("engine.scheduler.scheduler.MAX_LOGPROBS_CHUNK", 40)
    engine = make_engine(tiny, max_step_tokens=512)
    assert engine._chunk_limit is not None
    engine._chunk_limit.tokens = lambda *_: (60, 90)  # type: ignore[method-assign]
    engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    engine.submit(EngineRequest("scored", prompt(80, start=1), greedy(1, prompt_logprobs=0)))
    engine.submit(EngineRequest("plain", prompt(100, start=2), greedy(1)))
    assert [engine.step().stats.prompt_tokens for _ in range(2)] == [60, 60]
