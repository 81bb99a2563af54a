"""Models whose layers attend only to the last keys: earlier pages are freed, and not requested from prefill.

test_engine_stateful.py compares tokens too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from components.wire.sampling import SamplingParams
from components.wire.tokens import pack_tokens
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Exposed, Phase
from tests.engine.model.families import FAMILIES, WINDOW, reference, reference_greedy, save_model
from tests.engine.oracle import Oracle, guided
from tests.engine.tiny_engine import (
    Seen,
    cached_blocks,
    check_pages,
    greedy,
    load_tiny,
    make_engine,
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
KEPT = -(-(WINDOW + 1) // PAGE)  # full pages: those of the window, and of the one token that branches compute again
MAX_PAGES = KEPT + 2  # with the one that is being filled, and one before the first is given back


@pytest.fixture(scope="module")
def by_transformers(windowed_dir: Path) -> Callable[[tuple[int, ...], int], list[int]]:
    """Return transformers' tokens, computed once for each prompt and length."""
    model = reference(windowed_dir)
    return cache(lambda ids, max_tokens: reference_greedy(model, ids, max_tokens))


def held_while(engine: EngineCore, request: EngineRequest, after: int = 0) -> int:
    """Return the most pages held after `after` tokens."""
    engine.submit(request)
    seen, most = Seen(), 0
    while engine.has_work():
        seen.take(engine.step())
        check_pages(engine)
        if len(seen.tokens.get(request.request_id, ())) >= after:
            most = max(most, seen.steps[-1].held_pages)
    return most


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_long_answer_holds_the_pages_of_its_window_alone(
    windowed: LoadedModel, by_transformers: Callable[[tuple[int, ...], int], list[int]], attention: str
) -> None:
    engine = make_engine(windowed, num_pages=16, attention=attention)
    ids = prompt(30)
    assert held_while(engine, EngineRequest("r", ids, greedy(200, ignore_eos=True))) <= MAX_PAGES
    seen = run(make_engine(windowed, num_pages=16, attention=attention), [EngineRequest("r", ids, greedy(60))])
    assert seen.tokens["r"] == by_transformers(tuple(ids), 60)


def test_a_long_prompt_holds_them_as_soon_as_it_is_computed(windowed: LoadedModel) -> None:
    engine = make_engine(windowed, num_pages=16)
    assert held_while(engine, EngineRequest("r", prompt(200), greedy(30, ignore_eos=True)), after=2) <= MAX_PAGES


def test_answers_that_would_not_fit_together_without_it_run_at_once(windowed: LoadedModel, tiny: LoadedModel) -> None:
    requests = [EngineRequest(f"r{i}", prompt(40, start=i), greedy(150, ignore_eos=True)) for i in range(3)]
    settings = {"num_pages": 3 * MAX_PAGES, "reserve_tokens": 512}
    steps = run(make_engine(windowed, **settings), requests).steps
    assert steps[-1].preemptions == 0
    assert max(stats.num_running for stats in steps) == 3
    steps = run(make_engine(tiny, **settings), requests).steps
    assert max(stats.num_running for stats in steps) < 3


def test_pages_that_were_given_back_stay_in_the_prefix_cache(windowed: LoadedModel) -> None:
    engine = make_engine(windowed)
    ids = prompt(100)
    run(engine, [EngineRequest("r", ids, greedy(1))])
    assert peek(engine, ids) == 96
    assert peek(engine, ids[:40]) == 32
    engine._memory.pool.check()


def test_a_prefix_is_found_by_its_last_pages_when_the_first_are_evicted(
    windowed: LoadedModel, by_transformers: Callable[[tuple[int, ...], int], list[int]]
) -> None:
    engine = make_engine(windowed, num_pages=16)
    ids = prompt(150)
    run(engine, [EngineRequest("first", ids, greedy(1))])
    run(engine, [EngineRequest("evicts", prompt(170, start=9), greedy(1))])
    first_block = engine.prompt_blocks(pack_tokens(ids))(PAGE)[0]
    assert first_block not in cached_blocks(engine)
    assert peek(engine, ids) == 144
    seen = run(engine, [EngineRequest("again", ids, greedy(20))])
    assert seen.cached["again"] == 144
    assert seen.tokens["again"] == by_transformers(tuple(ids), 20)


def test_a_prompt_whose_last_pages_are_gone_is_computed_from_its_start(windowed: LoadedModel) -> None:
    engine = make_engine(windowed)
    ids = prompt(100)
    run(engine, [EngineRequest("r", ids, greedy(1))])
    for block in cached_blocks(engine)[4:]:
        engine._memory.pool.forget(block)
    assert peek(engine, ids) == 64
    engine._memory.pool.forget(cached_blocks(engine)[3])
    assert peek(engine, ids) == 48
    engine._memory.pool.check()


def reserve(engine: EngineCore, token_ids: list[int], sampling: SamplingParams) -> Exposed:
    engine.submit(EngineRequest("r", token_ids, sampling, Phase.DECODE))
    return run_until_idle(engine).reserved["r"]


@pytest.mark.parametrize("length", [1, 20, 23, 40, 100, 131])
@pytest.mark.parametrize("n", [1, 3])
def test_decode_asks_for_the_pages_of_the_window_alone(windowed: LoadedModel, length: int, n: int) -> None:
    p, d = make_engine(windowed), make_engine(windowed)
    ids, answer = prompt(length), greedy(40, ignore_eos=True, n=n)
    computed, reserved = prefilled(p, "r", ids, answer), reserve(d, ids, answer)
    skipped = reserved.num_computed // PAGE
    assert skipped == max(0, length - WINDOW - 1) // PAGE
    assert reserved.num_cached_tokens == 0
    assert d.step().stats.held_pages == len(reserved.pages) - skipped
    assert len(computed.pages) == len(reserved.pages)
    for source, target in list(zip(computed.pages, reserved.pages, strict=True))[skipped:]:
        write_page(d, target, read_page(p, source))
    assert computed.first_token is not None
    first = [token for output in d.deliver("r", computed.first_token) for token in output.token_ids]
    rest = run_until_idle(d)
    wanted = run(make_engine(windowed), [EngineRequest("r", ids, answer)])
    assert first + rest.tokens["r"] == wanted.tokens["r"]
    assert rest.branches == wanted.branches
    assert len(rest.branches) == n - 1


def test_a_window_shorter_than_a_page_keeps_all_pages(windowed: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries before the window named the page that was being filled: a chunk of two tokens read NaN of an earlier request in
    its free part."""
    drafts = Oracle.drafts
    monkeypatch.setattr(Oracle, "drafts", lambda self, most, least: drafts(self, min(most, 1), least))
    large = replace(windowed, layout=structs.replace(windowed.layout, page_size=32))
    request = EngineRequest("r", prompt(40), greedy(90, ignore_eos=True))
    plain = run(make_engine(large, page_size=32), [request]).tokens["r"]
    engine = guided(make_engine(large, page_size=32), [prompt(40) + plain], lies=3)
    for page in range(engine.kv_region.num_pages):
        write_page(engine, page, b"\xff" * len(read_page(engine, page)))  # NaN in any type
    seen = run(engine, [request])
    assert seen.tokens["r"] == plain
    assert not seen.failed
    assert reserve(engine, prompt(64, start=9), greedy(4, n=2)).num_computed == 0, "decode receives all pages, too"


def test_what_decode_has_cached_is_not_asked_for(windowed: LoadedModel) -> None:
    d = make_engine(windowed)
    run(d, [EngineRequest("warm", prompt(90), greedy(1))])
    reserved = reserve(d, prompt(90) + prompt(30, start=4), greedy(4))
    assert (reserved.num_computed, reserved.num_cached_tokens) == (96, 80)  # the last page that it needs is not cached
    d.cancel("r")
    d.release("r")
    run_until_idle(d)
    reserved = reserve(d, prompt(90), greedy(4))
    assert (reserved.num_computed, reserved.num_cached_tokens) == (80, 80)
    assert len(set(reserved.pages)) == len(reserved.pages) - (90 - WINDOW - 1) // PAGE


def test_prefill_keeps_all_its_pages_for_a_decode_with_larger_ones(windowed: LoadedModel) -> None:
    engine = make_engine(windowed)
    computed = prefilled(engine, "r", prompt(200), greedy(4))
    assert len(set(computed.pages)) == 13
    assert engine.step().stats.held_pages == 13


def test_one_layer_that_sees_all_keeps_all(tmp_path: Path) -> None:
    engine = make_engine(load_tiny(save_model(tmp_path, FAMILIES["gemma3"]())), num_pages=16)
    assert held_while(engine, EngineRequest("r", prompt(100), greedy(40, ignore_eos=True)), after=20) >= 8


def test_a_window_beyond_the_longest_context_is_none(windowed: LoadedModel) -> None:
    engine = make_engine(windowed, max_context=WINDOW)
    assert not engine._memory._kept_tokens
