"""Evicted pages that are kept beside the pool: what comes back is what was computed, and is not computed again.

Random lives over such a pool are in test_engine_stateful.py, and contents of pages in kv/test_offloaded_pages.py.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from components.wire.sampling import SamplingParams
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from tests.engine.mock_engine import make_mock
from tests.engine.test_engine_stateful import PAGES_OF, alone_of, alone_on, run_machine
from tests.engine.tiny_engine import (
    Seen,
    check_pages,
    greedy,
    make_engine,
    offload_gb,
    peek,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")

PAGE = 16
FIRST, SECOND, THIRD = prompt(100), prompt(100, start=9), prompt(100, start=5)  # six full pages each
SMALL = {"num_pages": 10, "reserve_tokens": 0}  # room for one of these
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)

Make = Callable[..., EngineCore]


@pytest.fixture
def make(tiny: LoadedModel) -> Make:
    """An engine with a small pool and, by default, room for 20 evicted pages."""

    def made(num_offloaded: int = 20, **changes: object) -> EngineCore:
        return make_engine(tiny, **{**SMALL, "kv_offload_gb": offload_gb(tiny.layout, num_offloaded), **changes})

    return made


def ask(engine: EngineCore, *prompts: list[int], sampling: SamplingParams = SEEDED) -> Seen:
    """One request after the other."""
    seen = Seen()
    for ids in prompts:
        engine.submit(EngineRequest(f"r{len(seen.tokens)}", ids, sampling))
        run_until_idle(engine, seen)
    return seen


def test_a_prefix_that_was_evicted_is_not_computed_again(tiny: LoadedModel, make: Make) -> None:
    wanted = ask(make_engine(tiny), FIRST, SECOND, FIRST).tokens
    engine = make()
    seen = ask(engine, FIRST, SECOND, FIRST)
    assert seen.tokens == wanted
    assert seen.cached["r2"] == 96
    last = seen.steps[-1]
    assert (last.restored_pages > 0, last.offloaded_pages > 0) == (True, True)
    assert last.prefix_hits == 96
    without = ask(make_engine(tiny, **SMALL), FIRST, SECOND, FIRST)
    assert without.cached["r2"] < 96
    assert without.prompt_tokens - seen.prompt_tokens == 96 - without.cached["r2"]


def test_a_hint_counts_evicted_pages(make: Make) -> None:
    engine = make()
    ask(engine, FIRST, SECOND)
    assert peek(engine, FIRST) == 96
    assert peek(engine, FIRST[:50]) == 48


def test_without_room_for_all_the_oldest_pages_are_gone(make: Make) -> None:
    engine = make(num_offloaded=3)
    ask(engine, FIRST, SECOND, THIRD)
    assert peek(engine, FIRST) == 0
    assert peek(engine, SECOND) > 0
    assert len(engine._memory.offloaded) == 3
    seen = ask(engine, FIRST, SECOND, THIRD, FIRST)
    assert seen.tokens["r0"] == seen.tokens["r3"]


def test_a_preempted_request_gets_back_what_it_computed(tiny: LoadedModel, make: Make) -> None:
    """Preemption makes pages cached, and the other requests evict them."""
    requests = [EngineRequest(f"r{i}", prompt(40, start=i), greedy(60, ignore_eos=True)) for i in range(4)]
    settings = {"num_pages": 14, "max_running": 4}
    without = run(make_engine(tiny, **{**SMALL, **settings}), requests)
    seen = run(make(40, **settings), requests)
    assert seen.tokens == without.tokens
    for stats in (without.steps[-1], seen.steps[-1]):
        assert stats.preemptions > 0
    assert seen.steps[-1].restored_pages > 0
    computed = [sum(stats.prompt_tokens for stats in each.steps) for each in (without, seen)]
    assert computed[1] <= computed[0]


def test_decode_asks_prefill_for_what_is_not_beside_the_pool_either(tiny: LoadedModel, make: Make) -> None:
    """And the pages that come back for it are those that it computed."""
    wanted = run(make_engine(tiny), [EngineRequest("d", FIRST, SEEDED)]).tokens["d"]
    engine = make()
    ask(engine, FIRST[:70], SECOND)
    engine.submit(EngineRequest("d", FIRST, SEEDED, Phase.DECODE))
    reserved = run_until_idle(engine).reserved["d"]
    assert (reserved.num_computed, reserved.num_cached_tokens) == (64, 64)
    prefill = make_engine(tiny)
    computed = prefilled(prefill, "d", FIRST, SEEDED)
    for source, target in list(zip(computed.pages, reserved.pages, strict=True))[64 // PAGE :]:
        write_page(engine, target, read_page(prefill, source))
    (first,) = engine.deliver("d", wanted[0])
    rest = run_until_idle(engine)
    assert first.token_ids + rest.tokens["d"] == wanted


def test_prefill_exposes_restored_pages_with_their_kv(tiny: LoadedModel, make: Make) -> None:
    engine = make()
    before = prefilled(engine, "before", FIRST, SEEDED)
    full = len(FIRST) // PAGE
    pages = [read_page(engine, page) for page in before.pages[:full]]
    engine.release("before")
    ask(engine, SECOND)
    after = prefilled(engine, "after", FIRST, SEEDED)
    assert [read_page(engine, page) for page in after.pages[:full]] == pages
    assert after.first_token == before.first_token
    assert engine.step().stats.restored_pages > 0


def test_kv_that_may_be_broken_does_not_come_back(make: Make) -> None:
    """A request with NaN logits forgets its blocks, wherever they are."""
    engine = make()
    ask(engine, FIRST, SECOND)
    for block in list(engine._memory.prefix._page_of):
        engine._memory.pool.forget(block)
    assert peek(engine, FIRST) == 0
    assert len(engine._memory.offloaded) == 0
    check_pages(engine)


def test_events_tell_a_router_of_evicted_pages_only_when_they_are_gone(tiny: LoadedModel) -> None:
    gb = offload_gb(tiny.layout, 5)
    engine = make_engine(tiny, **SMALL, kv_offload_gb=gb, kv_events=True)
    known: set[bytes] = set()
    for ids in (FIRST, SECOND, FIRST, THIRD, FIRST):
        engine.submit(EngineRequest("r", ids, greedy(1)))
        while engine.has_work():
            for block, is_stored in engine.step().cache_events:
                assert (block not in known) == is_stored
                (known.add if is_stored else known.discard)(block)
            assert known == set(engine._memory.prefix._page_of)
    assert len(known) > SMALL["num_pages"]


def test_windowed_requests_get_back_the_last_window(windowed: LoadedModel) -> None:
    gb = offload_gb(windowed.layout, 30)
    prompts = [prompt(150, start=i) for i in (0, 3, 6)]
    wanted = ask(make_engine(windowed), *prompts, prompts[0]).tokens
    engine = make_engine(windowed, num_pages=12, reserve_tokens=0, kv_offload_gb=gb)
    seen = ask(engine, *prompts, prompts[0])
    assert seen.tokens == wanted
    assert seen.cached["r3"] == 144
    assert 0 < seen.steps[-1].restored_pages <= 4, "not the pages before it"


@pytest.mark.timeout(300)
def test_pages_add_up_and_tokens_are_right_whatever_happens(tiny: LoadedModel) -> None:
    run_machine(partial(sized, tiny), 12, alone_on(tiny))


@pytest.mark.timeout(300)
def test_pages_add_up_and_tokens_are_right_with_windows(windowed: LoadedModel) -> None:
    run_machine(partial(sized, windowed), 8, alone_on(windowed))


def sized(loaded: LoadedModel, page_size: int, num_pages: int, **changes: object) -> EngineCore:
    """The small pools of the stateful test have room for as many evicted pages, the roomy ones for none."""
    layout = structs.replace(loaded.layout, page_size=page_size)
    gb = offload_gb(layout, num_pages) if num_pages == PAGES_OF[page_size] else None
    changes |= {"page_size": page_size, "num_pages": num_pages, "kv_offload_gb": gb}
    return make_engine(replace(loaded, layout=layout), **changes)


@pytest.mark.parametrize("room", [0.3, 2.0])
@pytest.mark.parametrize("window", [None, 40])
def test_pages_add_up_and_tokens_are_right_over_many_more_runs_with_the_mock(
    tmp_path: Path, window: int | None, room: float
) -> None:
    def make(page_size: int, num_pages: int, **changes: object) -> EngineCore:
        layout = make_mock(tmp_path, page_size=page_size).kv_region.layout
        kept = max(1, int(num_pages * room)) if num_pages == PAGES_OF[page_size] else 0
        gb = offload_gb(layout, kept) if kept else None
        return make_mock(
            tmp_path, {"window": window}, page_size=page_size, num_pages=num_pages, kv_offload_gb=gb, **changes
        )

    run_machine(make, 40, alone_of(make))


def test_a_prompt_with_log_probabilities_leaves_its_pages_in_the_pool(make: Make) -> None:
    engine = make()
    ask(engine, FIRST, SECOND)
    ask(engine, FIRST, sampling=greedy(1, prompt_logprobs=1))
    before = engine.step().stats.restored_pages
    seen = ask(engine, FIRST)
    assert seen.cached["r0"] == 96
    assert seen.steps[-1].restored_pages == before


def test_a_step_that_may_copy_pages_is_the_engine_threads(tiny: LoadedModel, make: Make) -> None:
    """Light calls of an event loop step the engine, unless it computes. A DECODE that was admitted so copied there."""
    engine, plain = make(), make_engine(tiny, **SMALL)
    ask(engine, FIRST, SECOND)
    for each in (engine, plain):
        each.submit(EngineRequest("d", FIRST, SEEDED, Phase.DECODE))
    assert (engine.computes(), plain.computes()) == (True, False)
    run_until_idle(engine)
    assert not engine.computes()


def test_the_time_of_copies_is_not_learned_as_that_of_prompt_tokens(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that returned made chunks beside decodes shorter."""
    copied_s = 0.02
    engine = make_engine(tiny, **SMALL, kv_offload_gb=offload_gb(tiny.layout, 20))
    copy_pages, learned = engine._runner.copy_pages, list[float]()

    def slow(moves: Sequence[tuple[int, int]]) -> None:
        time.sleep(copied_s)
        copy_pages(moves)

    monkeypatch.setattr(engine._runner, "copy_pages", slow)
    limit = SimpleNamespace(
        tokens=lambda *_: (100, 100), stepped=lambda _prompts, _decodes, step_s: learned.append(step_s)
    )
    monkeypatch.setattr(engine, "_chunk_limit", limit)
    seen = ask(engine, FIRST, SECOND, FIRST)
    assert sum(stats.step_s for stats in seen.steps) - sum(learned) > 2 * copied_s
    assert min(learned) >= 0


def test_wrong_settings_say_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"kv_offload_gb is -1\.0; it must be 0 \(evicted pages are lost\) or more"):
        EngineConfig(kv_offload_gb=-1.0)
