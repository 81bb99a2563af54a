"""Replaying the events of the prefix cache gives exactly what the cache holds, at every moment."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.wire.tokens import block_hashes, seed_hash
from engine.core.engine_core import EngineCore
from engine.ports import EngineRequest, Phase, StepOutput
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import GENERATING, cached_blocks, greedy, peek, prompt, run

PROMPTS = [prompt(n, start=s) + prompt(m, start=9) for n, s, m in [(16, 0, 0), (40, 0, 5), (40, 0, 30), (70, 1, 0)]]


class Replica:
    """What a router knows: blocks, in the order in which they came."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def take(self, output: StepOutput) -> None:
        for block, is_stored in output.cache_events:
            if is_stored:
                assert block not in self.blocks, "stored twice"
                self.blocks.append(block)
            else:
                self.blocks.remove(block)

    def check(self, engine: EngineCore) -> None:
        assert self.blocks == cached_blocks(engine)
        assert set(self.blocks) == set(engine._memory.prefix._hash_of.values())


def make_engine(home: Path, **changes: object) -> EngineCore:
    return make_mock(home, **{"kv_events": True, **changes})


def test_events_name_the_chain_of_block_hashes(tmp_path: Path) -> None:
    engine, replica = make_engine(tmp_path), Replica()
    engine.submit(EngineRequest("r", prompt(50), greedy(2), cache_salt="tenant"))
    replica.take(engine.step())
    assert replica.blocks == block_hashes(prompt(50), 16, seed_hash(engine.kv_region.layout.model, "", "tenant"))


def test_eviction_is_told_from_the_end_of_a_chain(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_pages=4, reserve_tokens=0)
    run(engine, [EngineRequest("old", prompt(48), greedy(1))])
    engine.submit(EngineRequest("new", prompt(20, start=1), greedy(1)))
    events = engine.step().cache_events
    seed = seed_hash(engine.kv_region.layout.model)
    chain = block_hashes(prompt(48), 16, seed)
    assert events == [(chain[-1], False), (block_hashes(prompt(20, start=1), 16, seed)[0], True)]


def test_blocks_that_come_between_steps_are_told_without_further_work(tmp_path: Path) -> None:
    engine, replica = make_engine(tmp_path), Replica()
    engine.submit(EngineRequest("d", prompt(40), greedy(1), Phase.DECODE))
    replica.take(engine.step())
    assert not replica.blocks
    engine.deliver("d", 7)
    assert engine.has_work()
    replica.take(engine.step())
    assert len(replica.blocks) == 2
    assert not engine.has_work()


def test_nothing_is_told_where_nobody_listens(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, kv_events=False)
    engine.submit(EngineRequest("r", prompt(50), greedy(2)))
    for _ in range(2):
        assert engine.step().cache_events == []
    assert len(cached_blocks(engine)) == 3
    assert not engine._memory.prefix.events, "nothing piles up"


Action = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.sampled_from(GENERATING)),
    st.tuples(st.just("step"), st.integers(1, 6), st.none()),
    st.tuples(st.just("deliver"), st.integers(0, 30), st.none()),
    st.tuples(st.just("recompute"), st.integers(0, 30), st.none()),
    st.tuples(st.just("drop"), st.integers(0, 30), st.none()),
)


@pytest.mark.usefixtures("pipeline")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(Action, max_size=60))
def test_replaying_events_gives_the_caches_content(
    tmp_path: Path, actions: list[tuple[str, int, Phase | None]]
) -> None:
    engine, replica = (
        make_engine(tmp_path, num_pages=10, max_running=5, max_step_tokens=24, reserve_tokens=8),
        Replica(),
    )
    names: list[str] = []

    def step() -> None:
        replica.take(engine.step())
        replica.check(engine)

    for action, number, phase in actions:
        name = names[number % len(names)] if names else ""
        match action:
            case "submit":
                names.append(f"r{len(names)}")
                engine.submit(
                    EngineRequest(names[-1], PROMPTS[number], greedy(60, ignore_eos=True), phase or Phase.FULL)
                )
            case "step":
                for _ in range(number):
                    step()
            case "deliver" if _is_reserved(engine, name):
                _land(engine, name)
                engine.deliver(name, 7)
            case "recompute":
                engine.recompute(name)
            case "drop":
                engine.cancel(name)
                engine.release(name)
    step()


def _is_reserved(engine: EngineCore, name: str) -> bool:
    return any(request.id == name for request in engine._scheduler.reserved)


def _land(engine: EngineCore, name: str) -> None:
    """What prefill would have written."""
    request = engine._requests._live[name]
    runner = engine._runner
    runner._pages.compute(request.pages, request.tokens, request.num_computed, request.prompt_len)  # type: ignore[attr-defined]


@pytest.mark.parametrize("first_ends", [True, False])
def test_a_block_that_two_requests_computed_stays_named_when_the_first_one_goes(
    tmp_path: Path, first_ends: bool
) -> None:
    """Its page is evicted, but the second request has the same tokens in a page of its own."""
    engine = make_engine(tmp_path, num_pages=6, reserve_tokens=0, max_step_tokens=120)
    answers = (1, 20) if first_ends else (20, 1)
    for name, length in zip("ab", answers, strict=True):
        engine.submit(EngineRequest(name, prompt(34), greedy(length, ignore_eos=True)))
    run(engine, [])
    assert peek(engine, prompt(34)) == 32
