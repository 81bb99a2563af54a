"""Admission, budget, preemption: with the tiny model, so that every finished request can be compared with itself."""

import pytest

from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from tests.engine.tiny_engine import Seen, alone, check_pages, greedy, make_engine, prompt, run, run_until_idle


def endless(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, ignore_eos=True)


def test_running_decodes_come_first_and_prompts_share_what_is_left(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=20)
    engine.submit(EngineRequest("short", prompt(10), endless(30)))
    engine.step()
    engine.submit(EngineRequest("long1", prompt(30, start=1), endless(30)))
    engine.submit(EngineRequest("long2", prompt(30, start=2), endless(30)))
    stats = [engine.step().stats for _ in range(5)]
    assert [s.prompt_tokens for s in stats] == [19, 11 + 8, 18, 4, 0]
    assert [s.decode_tokens for s in stats] == [1, 2, 2, 3, 3]


def test_a_step_takes_no_further_prompt_when_it_has_enough_to_do(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, pack_tokens=10)
    for i, length in enumerate([30, 30, 4, 4, 4, 4, 60]):
        engine.submit(EngineRequest(str(i), prompt(length, start=i), endless(1)))
    assert [engine.step().stats.prompt_tokens for _ in range(6)] == [30, 30, 4 + 4 + 4, 4 + 44, 16, 0]


def test_no_step_exceeds_the_budget_and_no_decode_waits_for_a_prompt(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=20)
    engine.submit(EngineRequest("talks", prompt(5), endless(25)))
    engine.step()
    engine.submit(EngineRequest("reads", prompt(200, start=1), endless(2)))
    seen = run_until_idle(engine)
    assert all(s.prompt_tokens + s.decode_tokens <= 20 + 1 for s in seen.steps)
    assert all(s.decode_tokens >= 1 for s in seen.steps[:24])


def test_at_most_max_running_requests_hold_a_place_reserved_ones_included(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_running=3)
    for i in range(2):
        engine.submit(EngineRequest(f"d{i}", prompt(5, start=i), endless(5), Phase.DECODE))
    for i in range(3):
        engine.submit(EngineRequest(f"f{i}", prompt(5, start=i), endless(5)))
    stats = engine.step().stats
    assert (stats.num_reserved, stats.num_running, stats.num_waiting) == (2, 1, 2)


@pytest.mark.parametrize("steps", [0, 1])
def test_who_needs_only_pages_does_not_wait_for_prompts_to_be_computed(tiny: LoadedModel, steps: int) -> None:
    engine = make_engine(tiny, max_step_tokens=20, pack_tokens=10)
    for i in range(4):
        engine.submit(EngineRequest(f"f{i}", prompt(30, start=i), endless(2)))
    for _ in range(steps):
        engine.step()
    engine.submit(EngineRequest("d", prompt(30, start=9), endless(2), Phase.DECODE))
    engine.submit(EngineRequest("behind", prompt(30, start=10), endless(2)))
    output = engine.step()
    assert [r.request_id for r in output.reserved] == ["d"]
    assert (output.stats.num_running, output.stats.num_waiting) == (1, 4), "nobody else is given pages before its turn"


def test_a_request_that_needs_only_pages_leaves_those_that_prompts_before_it_will_need(tiny: LoadedModel) -> None:
    """Each prompt needs three pages, with its answer."""
    engine = make_engine(tiny, num_pages=9, reserve_tokens=16, max_running=8, max_step_tokens=10, pack_tokens=5)
    for i in range(3):
        engine.submit(EngineRequest(f"f{i}", prompt(30, start=i), endless(9)))
    engine.submit(EngineRequest("d", prompt(30, start=9), endless(9), Phase.DECODE))
    seen = [engine.step() for _ in range(3)]
    assert not any(output.reserved for output in seen)
    assert seen[-1].stats.free_pages >= 6, "there are pages, but not for everyone before it"
    engine.cancel("f2")
    assert [r.request_id for r in engine.step().reserved] == ["d"]


def test_reservations_wait_for_the_reserve_of_those_before_them(tiny: LoadedModel) -> None:
    """16 prompt tokens and 32 reserved ones are 3 pages: of 6 pages, two requests get theirs and the third waits."""
    engine = make_engine(tiny, num_pages=6, reserve_tokens=32)
    for i in range(3):
        engine.submit(EngineRequest(f"d{i}", prompt(16, start=i), endless(90), Phase.DECODE))
    output = engine.step()
    assert [r.request_id for r in output.reserved] == ["d0", "d1"]
    assert output.stats.held_pages == 2
    assert not engine.has_work()
    engine.cancel("d0")
    assert not engine.has_work(), "its page is held, and two more are promised to d1"
    engine.release("d0")
    assert [r.request_id for r in engine.step().reserved] == ["d2"]


def test_admission_is_first_in_first_out_also_when_a_later_one_would_fit(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, num_pages=8, reserve_tokens=16)
    engine.submit(EngineRequest("first", prompt(60), endless(40), Phase.DECODE))
    engine.step()
    engine.submit(EngineRequest("large", prompt(60, start=1), endless(40), Phase.DECODE))
    engine.submit(EngineRequest("small", prompt(3, start=2), endless(4), Phase.DECODE))
    assert not engine.has_work()
    engine.cancel("large")
    assert [r.request_id for r in engine.step().reserved] == ["small"]


def test_preempted_requests_come_back_and_go_on_with_the_same_tokens(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, num_pages=10, reserve_tokens=0)
    prompts = {f"r{i}": prompt(17 + i, start=i) for i in range(5)}
    seen = run(engine, [EngineRequest(name, ids, endless(60)) for name, ids in prompts.items()])
    assert seen.steps[-1].preemptions > 2
    assert seen.tokens == {name: alone(tiny, ids, endless(60)) for name, ids in prompts.items()}


def test_preempted_samples_go_on_with_the_same_draws(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, num_pages=10, reserve_tokens=0)
    drawn = {
        f"r{i}": SamplingParams(max_tokens=60, temperature=1.0, top_p=0.9, seed=i, ignore_eos=True) for i in range(5)
    }
    seen = run(engine, [EngineRequest(name, prompt(17), params) for name, params in drawn.items()])
    assert seen.steps[-1].preemptions > 2
    assert seen.tokens == {name: alone(tiny, prompt(17), params) for name, params in drawn.items()}


def test_the_youngest_is_preempted_and_the_oldest_never(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(tiny, num_pages=10, reserve_tokens=0)
    with caplog.at_level("INFO", logger="engine.scheduler.scheduler"):
        run(engine, [EngineRequest(f"r{i}", prompt(17, start=i), endless(60)) for i in range(5)])
    preempted = [vars(record)["request_id"] for record in caplog.records if record.msg == "request preempted"]
    assert preempted[0] == "r4"
    assert "r0" not in preempted


def test_a_decode_that_finds_no_page_beside_reservations_waits_for_them_and_goes_on(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, num_pages=6, reserve_tokens=0)
    engine.submit(EngineRequest("runs", prompt(20), endless(60)))
    engine.step()
    engine.submit(EngineRequest("reserved", prompt(60, start=1), endless(9), Phase.DECODE))
    seen = run_until_idle(engine)
    assert seen.steps[-1].num_waiting == 1, "it has preempted itself"
    engine.cancel("reserved")
    engine.release("reserved")
    before = seen.tokens["runs"]
    assert len(before) < 59
    seen = run_until_idle(engine, seen)
    assert len(seen.tokens["runs"]) == 59, "the first token came with the step before"
    assert alone(tiny, prompt(20), endless(60))[1:] == seen.tokens["runs"]


def test_a_prefill_is_never_preempted(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, num_pages=8, reserve_tokens=0, max_step_tokens=20)
    engine.submit(EngineRequest("talks", prompt(15), endless(80)))
    engine.step()
    engine.submit(EngineRequest("prompt", prompt(100, start=1), endless(2), Phase.PREFILL))
    seen = Seen()
    while "prompt" not in seen.computed or seen.computed["prompt"][-1].first_token is None:
        seen.take(engine.step())
        check_pages(engine)
    assert len({tuple(c.pages) for c in seen.computed["prompt"]}) == 1
    engine.release("prompt")
    seen = run_until_idle(engine, seen)
    assert seen.tokens["talks"] == alone(tiny, prompt(15), endless(80))[1:]


def test_a_page_under_eviction_is_never_one_that_the_new_request_shares(tiny: LoadedModel) -> None:
    """Its hit pages stop being available when it is admitted: counting them twice would admit it too early."""
    engine = make_engine(tiny, num_pages=6, reserve_tokens=0)
    run(engine, [EngineRequest("warm", prompt(64), endless(1))])
    seen = run(engine, [EngineRequest("hit", prompt(64) + prompt(20, start=3), endless(8))])
    assert seen.cached["hit"] == 64
    assert seen.tokens["hit"] == alone(tiny, prompt(64) + prompt(20, start=3), endless(8))


def test_prefix_hits_are_counted(engine: EngineCore) -> None:
    run(engine, [EngineRequest("a", prompt(40), endless(2))])
    stats = run(engine, [EngineRequest("b", prompt(40), endless(2))]).steps[-1]
    assert (stats.prefix_queries, stats.prefix_hits) == (80, 32)


def test_a_prompt_preempted_before_its_first_token_is_no_prefix_hit_of_itself(tiny: LoadedModel) -> None:
    """Usage and metrics counted the pages that the request had computed itself as cached."""
    engine = make_engine(tiny, num_pages=8, reserve_tokens=0, max_step_tokens=24)
    seen = run(
        engine,
        [EngineRequest("talks", prompt(30), endless(10)), EngineRequest("prompt", prompt(90, start=1), endless(2))],
    )
    assert seen.steps[-1].preemptions == 1
    assert seen.prompt_tokens < 30 + 90 + 90, "it used its own pages again"
    assert seen.cached["prompt"] == 0
    assert (seen.steps[-1].prefix_queries, seen.steps[-1].prefix_hits) == (30 + 90, 0)


def test_a_branch_that_waits_for_a_place_is_no_prefix_hit_of_its_own_prompt(tiny: LoadedModel) -> None:
    seen = run(make_engine(tiny, max_running=1), [EngineRequest("r", prompt(40), greedy(2, n=2))])
    assert ("r", 1) in seen.branches
    assert (seen.steps[-1].prefix_queries, seen.steps[-1].prefix_hits) == (40, 0)
