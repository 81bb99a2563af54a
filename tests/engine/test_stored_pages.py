"""Pages in files: another engine, as after a restart or on another host, gets KV that was computed, and does not repeat it.

Files alone are tested in kv/test_page_files.py, and the threads beside the engine in kv/test_page_store.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest
from msgspec import structs

from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.kv.page_files import PageFiles
from engine.kv.page_store import Background
from engine.loop.threaded_loop import ThreadedLoop
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from engine.scheduler import scheduler
from tests.engine.mock_engine import make_mock
from tests.engine.oracle import at_no_cost, guided, texts_of
from tests.engine.test_engine_stateful import PAGES_OF, alone_of, alone_on, run_machine
from tests.engine.tiny_engine import (
    Seen,
    greedy,
    make_engine,
    offload_gb,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    write_page,
)
from tests.waiting import until, wait_until

pytestmark = pytest.mark.usefixtures("pipeline")

FIRST, SECOND = prompt(100), prompt(100, start=9)  # six full pages each
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)


@contextmanager
def opened(loaded: LoadedModel, directory: Path, **changes: object) -> Iterator[EngineCore]:
    """An engine as a process would have it: it saves what it computed before it ends."""
    engine = make_engine(loaded, **{"kv_store_dir": directory, **changes})
    try:
        yield engine
    finally:
        engine.close()


def ask(engine: EngineCore, *prompts: list[int], sampling: SamplingParams = SEEDED, **changes: object) -> Seen:
    """One request after the other."""
    seen = Seen()
    for ids in prompts:
        engine.submit(EngineRequest(f"r{len(seen.tokens)}", ids, sampling, **changes))
        run_until_idle(engine, seen)
    return seen


def num_files(directory: Path) -> int:
    return sum(path.is_file() for path in directory.rglob("*"))


def test_another_engine_does_not_compute_a_prompt_again(tiny: LoadedModel, tmp_path: Path) -> None:
    wanted = ask(make_engine(tiny), FIRST, SECOND).tokens
    with opened(tiny, tmp_path) as engine:
        assert ask(engine, FIRST, SECOND).tokens == wanted
    with opened(tiny, tmp_path) as engine:
        seen = ask(engine, FIRST, SECOND)
        assert seen.tokens == wanted
        assert seen.cached == {"r0": 96, "r1": 96}
        assert seen.prompt_tokens == 8
        stats = seen.steps[-1]
        assert (stats.loaded_pages, stats.saved_pages, stats.prefix_hits) == (12, 0, 192)


def test_an_answer_is_saved_too_so_the_next_turn_finds_it(tiny: LoadedModel, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as engine:
        answer = ask(engine, FIRST).tokens["r0"]
    turn = [*FIRST, *answer, *prompt(10, start=3)]
    with opened(tiny, tmp_path) as engine:
        seen = ask(engine, turn)
    assert seen.cached["r0"] == 112
    assert seen.tokens == ask(make_engine(tiny), turn).tokens


def test_engines_that_run_at_the_same_time_share_their_pages(tiny: LoadedModel, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as one, opened(tiny, tmp_path) as other:
        ask(one, FIRST)
        wait_until(lambda: num_files(tmp_path) == 7)
        assert ask(other, FIRST).cached["r0"] == 96


def test_salts_adapters_and_models_do_not_share_pages(tiny: LoadedModel, tmp_path: Path) -> None:
    other_weights = replace(tiny, layout=structs.replace(tiny.layout, model="other"))
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST, cache_salt="a tenant")
    with opened(tiny, tmp_path) as engine:
        assert ask(engine, FIRST, cache_salt="another tenant").cached["r0"] == 0
        assert ask(engine, FIRST).cached["r0"] == 0
    with opened(other_weights, tmp_path) as engine:
        assert ask(engine, FIRST, cache_salt="a tenant").cached["r0"] == 0
    with opened(tiny, tmp_path) as engine:
        assert ask(engine, FIRST, cache_salt="a tenant").cached["r0"] == 96


def test_a_prefix_in_memory_continues_in_files(tiny: LoadedModel, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST)
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST[:50])
        seen = ask(engine, FIRST)
        assert seen.cached["r0"] == 96
        assert seen.steps[-1].loaded_pages == 3 + 3


def test_loaded_pages_are_reported_to_routers(tiny: LoadedModel, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST)
    with opened(tiny, tmp_path, kv_events=True) as engine:
        engine.submit(EngineRequest("r", FIRST, greedy(1)))
        stored = [block for block, is_stored in engine.step().cache_events if is_stored]
        assert len(stored) == 6


def test_a_prompt_with_log_probabilities_is_computed(tiny: LoadedModel, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST)
    with opened(tiny, tmp_path) as engine:
        seen = ask(engine, FIRST, sampling=greedy(1, prompt_logprobs=1))
        assert seen.cached["r0"] == 0
        assert len(seen.prompt_logprobs["r0"]) == 99


def test_decode_needs_no_pages_from_prefill_that_are_in_files(tiny: LoadedModel, tmp_path: Path) -> None:
    """And it saves the answer only, because prefill saves the prompt."""
    wanted = ask(make_engine(tiny), FIRST).tokens["r0"]
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST[:70])
    with opened(tiny, tmp_path) as decode, opened(tiny, tmp_path / "unused") as prefill:
        decode.submit(EngineRequest("d", FIRST, SEEDED, Phase.DECODE))
        reserved = run_until_idle(decode).reserved["d"]
        assert (reserved.num_computed, reserved.num_cached_tokens) == (64, 64)
        computed = prefilled(prefill, "d", FIRST, SEEDED)
        for source, target in zip(computed.pages[4:], reserved.pages[4:], strict=True):
            write_page(decode, target, read_page(prefill, source))
        assert computed.first_token is not None
        (first,) = decode.deliver("d", computed.first_token)
        rest = run_until_idle(decode).tokens["d"]
        assert [*first.token_ids, *rest] == wanted
    with opened(tiny, tmp_path) as engine:
        store = engine._memory.store
        assert store is not None
        hashes = engine.prompt_blocks(b"".join(i.to_bytes(4, "little") for i in [*FIRST, *wanted]))(16)[:]
        assert [store.load([each], [0]) for each in hashes] == [1, 1, 1, 1, 0, 0, 1]


def test_a_step_with_decodes_loads_a_few_pages_only(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt would delay their tokens. Decode takes what it loads at once, and the rest from prefill."""
    monkeypatch.setattr(scheduler, "LOADED_BESIDE_DECODES", 4)
    ids = prompt(200)
    with opened(tiny, tmp_path) as engine:
        wanted = ask(engine, ids).tokens["r0"]
    with opened(tiny, tmp_path, kv_events=True) as engine:
        seen = Seen()
        engine.submit(EngineRequest("decode", prompt(5), greedy(60, ignore_eos=True)))
        seen.take(engine.step())
        engine.submit(EngineRequest("prompt", ids, SEEDED))
        run_until_idle(engine, seen)
        loaded = [stats.loaded_pages for stats in seen.steps]
        assert {after - before for before, after in pairwise(loaded)} == {0, 4}
        assert loaded[-1] == 12
        assert seen.cached["prompt"] == 192
        assert seen.steps[-1].prefix_hits == 192
        assert seen.tokens["prompt"] == wanted
    with opened(tiny, tmp_path) as engine:
        engine.submit(EngineRequest("decode", prompt(5), greedy(60, ignore_eos=True)))
        engine.step()
        engine.submit(EngineRequest("d", ids, SEEDED, Phase.DECODE))
        reserved = run_until_idle(engine).reserved["d"]
        assert (reserved.num_computed, reserved.num_cached_tokens) == (64, 64)


def test_branches_of_a_reservation_compute_no_more_than_their_last_tokens(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation that had not loaded all files passed that on to its branches. They lost the tokens after the last
    full page."""
    monkeypatch.setattr(scheduler, "LOADED_BESIDE_DECODES", 4)
    ids = prompt(204)
    with opened(tiny, tmp_path) as engine:
        ask(engine, ids)
    with opened(tiny, tmp_path) as engine:
        engine.submit(EngineRequest("decode", prompt(5), greedy(60, ignore_eos=True)))
        engine.step()
        engine.submit(EngineRequest("d", ids, structs.replace(SEEDED, n=2), Phase.DECODE))
        while "d" not in {exposed.request_id for exposed in engine.step().reserved}:
            pass
        engine.deliver("d", 7)
        seen = run_until_idle(engine)
        assert sum(stats.prompt_tokens for stats in seen.steps) == 2


def test_a_moved_request_continues_with_the_files_of_a_lost_worker(tiny: LoadedModel, tmp_path: Path) -> None:
    wanted = ask(make_engine(tiny), FIRST, sampling=structs.replace(SEEDED, max_tokens=60)).tokens["r0"]
    with opened(tiny, tmp_path) as lost:
        assert ask(lost, FIRST, sampling=structs.replace(SEEDED, max_tokens=40)).tokens["r0"] == wanted[:40]
    with opened(tiny, tmp_path) as engine:
        moved = EngineRequest("m", [*FIRST, *wanted[:40]], structs.replace(SEEDED, max_tokens=20), num_generated=40)
        seen = run(engine, [moved])
        assert seen.tokens["m"] == wanted[40:]
        assert seen.cached["m"] == 128


def test_kv_that_may_be_broken_is_deleted(tiny: LoadedModel, tmp_path: Path) -> None:
    """A request with NaN logits forgets its blocks, wherever they are."""
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST)
        before = num_files(tmp_path)
        request = engine._requests  # as `Outcomes` does for such a request
        engine.submit(EngineRequest("bad", FIRST, greedy(5)))
        engine.step()
        engine._memory.forget(request._live["bad"])
        engine.cancel("bad")
        run_until_idle(engine)
    assert num_files(tmp_path) == before - 6


def test_kv_that_was_computed_from_broken_kv_is_deleted_too(tiny: LoadedModel, tmp_path: Path) -> None:
    """Requests that share a page with a broken one kept their files, though not their pages in memory."""
    with opened(tiny, tmp_path) as engine:
        ask(engine, FIRST)
        for name, text in (("bad", FIRST), ("other", [*FIRST[:64], *prompt(60, start=3)])):
            engine.submit(EngineRequest(name, text, greedy(9, ignore_eos=True)))
        live = engine._requests._live
        while not live["other"].has_begun:
            engine.step()
        wait_until(lambda: num_files(tmp_path) == 10)
        engine._memory.forget(live["bad"])
        engine.cancel("bad")
        run_until_idle(engine)
    assert num_files(tmp_path) == 1, "only the first answer's page is left"


def test_a_preempted_request_loads_what_it_computed(tiny: LoadedModel, tmp_path: Path) -> None:
    requests = [EngineRequest(f"r{i}", prompt(40, start=i), greedy(60, ignore_eos=True)) for i in range(4)]
    sizes = {"num_pages": 14, "max_running": 4, "reserve_tokens": 0}
    wanted = run(make_engine(tiny, **sizes), requests)
    with opened(tiny, tmp_path, **sizes) as engine:
        seen = run(engine, requests)
    assert seen.tokens == wanted.tokens
    assert seen.steps[-1].preemptions > 0
    assert sum(stats.prompt_tokens for stats in seen.steps) <= sum(stats.prompt_tokens for stats in wanted.steps)


def test_files_follow_evicted_pages_in_memory(tiny: LoadedModel, tmp_path: Path) -> None:
    """The ids of slots come after those of evicted pages."""
    kept = {"num_pages": 10, "reserve_tokens": 0, "kv_offload_gb": offload_gb(tiny.layout, 6)}
    prompts = [prompt(100, start=i) for i in range(4)]
    again = [*prompts, prompts[2], prompts[0], prompts[2]]
    wanted = ask(make_engine(tiny), *again).tokens
    with opened(tiny, tmp_path, **kept) as engine:
        seen = ask(engine, *again)
    assert seen.tokens == wanted
    assert [seen.cached[f"r{i}"] for i in range(4, 7)] == [96] * 3
    last = seen.steps[-1]
    assert last.restored_pages > 0
    assert last.loaded_pages > 0


def test_windowed_requests_load_their_prompt(windowed: LoadedModel, tmp_path: Path) -> None:
    ids = prompt(150)
    wanted = ask(make_engine(windowed), ids).tokens
    with opened(windowed, tmp_path) as engine:
        ask(engine, ids)
    with opened(windowed, tmp_path) as engine:
        seen = ask(engine, ids, ids)
    assert seen.tokens["r0"] == seen.tokens["r1"] == wanted["r0"]
    assert seen.cached == {"r0": 144, "r1": 144}


def test_pages_of_drafts_are_saved_with_the_tokens_that_were_accepted(tiny: LoadedModel, tmp_path: Path) -> None:
    long = structs.replace(SEEDED, max_tokens=40)
    wanted = ask(make_engine(tiny), FIRST, sampling=long)
    with opened(tiny, tmp_path, pipeline="off") as engine:
        seen = ask(guided(engine, texts_of(wanted, {"r0": FIRST}), lies=4), FIRST, sampling=long)
        assert 0 < seen.steps[-1].accepted_tokens < seen.steps[-1].drafted_tokens
    with opened(tiny, tmp_path) as engine:
        text = [*FIRST, *wanted.tokens["r0"], 9, 9]
        assert ask(engine, text).tokens == ask(make_engine(tiny), text).tokens


def test_the_last_page_is_saved_though_drafts_filled_it(tiny: LoadedModel, tmp_path: Path) -> None:
    """Accepted drafts of the last step got their KV after the step's pages had been saved."""
    long = structs.replace(SEEDED, max_tokens=29)
    wanted = ask(make_engine(tiny), FIRST, sampling=long)
    with opened(tiny, tmp_path, pipeline="off") as engine:
        seen = ask(at_no_cost(guided(engine, texts_of(wanted, {"r0": FIRST}))), FIRST, sampling=long)
        assert seen.steps[-1].accepted_tokens > 20
    assert num_files(tmp_path) == 8


@pytest.mark.anyio
async def test_an_idle_engine_saves_the_rest(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pages wait than there are slots, and no request comes that would make a step.

    The number of saved pages did not include those that were written after the last step.
    """
    writes, write = threading.Event(), PageFiles.write
    monkeypatch.setattr(PageFiles, "write", lambda *args: writes.wait() and write(*args))
    monkeypatch.setattr("engine.kv.count.STAGED_PAGES", range(2, 4))
    loop = ThreadedLoop(lambda: make_engine(tiny, kv_store_dir=tmp_path))
    await loop.start()
    try:
        await loop.between_steps(lambda engine: engine.submit(EngineRequest("r", FIRST, greedy(1))))
        await until(lambda: loop.stats.unsaved_pages >= 4)
        writes.set()
        await until(lambda: num_files(tmp_path) == 6)
        await until(lambda: (loop.stats.saved_pages, loop.stats.unsaved_pages) == (6, 0))
    finally:
        await loop.stop()


@pytest.mark.timeout(300)
def test_pages_add_up_and_tokens_are_right_whatever_happens(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Background, "run", run_now)
    run_machine(partial(stored, tiny, tmp_path, count()), 8, alone_on(tiny))


def run_now(_thread: Background, call: Callable[[], object]) -> None:
    """Repeat a run exactly: threads would save more or fewer pages."""
    call()


def stored(
    loaded: LoadedModel, home: Path, runs: Iterator[int], page_size: int, num_pages: int, **changes: object
) -> EngineCore:
    """Small pools have files; roomy ones, with which the test compares, have none."""
    layout = structs.replace(loaded.layout, page_size=page_size)
    directory = home / str(next(runs)) if num_pages == PAGES_OF[page_size] else None
    changes |= {"page_size": page_size, "num_pages": num_pages, "kv_store_dir": directory}
    return make_engine(replace(loaded, layout=layout), **changes)


def test_pages_add_up_and_tokens_are_right_over_many_more_runs_with_the_mock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Background, "run", run_now)
    runs = count()

    def make(page_size: int, num_pages: int, **changes: object) -> EngineCore:
        directory = tmp_path / str(next(runs)) if num_pages == PAGES_OF[page_size] else None
        return make_mock(tmp_path, page_size=page_size, num_pages=num_pages, kv_store_dir=directory, **changes)

    run_machine(make, 20, alone_of(make))


@pytest.mark.parametrize(
    ("heads", "ranks"),
    [(4, (1, 2)), (4, (2, 1)), (4, (2, 4)), (4, (4, 3)), (2, (1, 4)), (2, (4, 4)), (2, (4, 1)), (1, (2, 2))],
)
def test_mock_instances_of_any_number_of_ranks_share_files(tmp_path: Path, heads: int, ranks: tuple[int, int]) -> None:
    """With more ranks than heads, only one of the ranks with the same head got it from the file."""
    first, second = (
        make_mock(tmp_path, {"kv_heads": heads}, tensor_parallel=each, kv_store_dir=tmp_path / "kv") for each in ranks
    )
    wanted = ask(first, FIRST).tokens
    first.close()
    seen = ask(second, FIRST)
    second.close()
    assert seen.tokens == wanted
    assert seen.cached["r0"] == 96
