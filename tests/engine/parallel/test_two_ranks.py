"""An instance of two ranks gives the ids of one, whatever a request asks for and whatever else is in the batch (fp32)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from components.wire.sampling import SamplingParams
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from tests.engine.lora.lora_files import save_adapter
from tests.engine.oracle import guided, texts_of
from tests.engine.parallel.led import Led, led
from tests.engine.sampling.test_in_engine import Cycle
from tests.engine.test_engine_stateful import alone_on, run_machine
from tests.engine.tiny_engine import (
    PIPELINE,
    Seen,
    greedy,
    load_tiny,
    make_engine,
    offload_gb,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    write_page,
)
from tests.waiting import wait_until

PROMPT = prompt(53)
SEEDED = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("adapters")
    few = save_adapter(home / "few", tiny_dir, 2, rank=2, targets=("q_proj", "v_proj", "o_proj"))
    return {"all": str(save_adapter(home / "all", tiny_dir, 1)), "few": str(few)}


@pytest.fixture(scope="module")
def one(tiny_dir: Path, adapters: dict[str, str]) -> LoadedModel:
    return load_tiny(tiny_dir, lora=adapters)


@pytest.fixture(scope="module")
def two(tiny_dir: Path, adapters: dict[str, str], kernel: str | None) -> Iterator[Led]:
    with led(tiny_dir, 2, lora=adapters) as instance:
        yield instance


def requests() -> list[EngineRequest]:
    """Greedy and seeded, with adapters and without, with branches, penalties, masks and log-probabilities."""
    chunked = [EngineRequest(f"chunk{i}", prompt(40 + 30 * i, start=i), greedy(20, ignore_eos=True)) for i in range(3)]
    adapted = [EngineRequest(f"lora{name}", PROMPT, SEEDED, adapter=name) for name in ("all", "few")]
    told = structs.replace(SEEDED, logprobs=3, prompt_logprobs=2, seed=5)
    branched = structs.replace(SEEDED, n=3, frequency_penalty=0.5, seed=6)
    return [
        *chunked,
        *adapted,
        EngineRequest("told", prompt(37, start=4), told),
        EngineRequest("branched", prompt(33, start=5), branched),
        EngineRequest("masked", prompt(20, start=6), greedy(9), mask=Cycle([9, 40, 127])),
        EngineRequest("moved", prompt(60, start=7), SEEDED, num_generated=11),
    ]


@pytest.fixture(scope="module")
def wanted(one: LoadedModel) -> Seen:
    return run(make_engine(one, num_pages=200), requests())


@pytest.mark.parametrize("pipeline", ["off", "on"])
@pytest.mark.parametrize("pool", [{}, {"num_pages": 30, "reserve_tokens": 0}], ids=["room for all", "preempting"])
def test_ids_are_those_of_one_rank(two: Led, wanted: Seen, pool: dict[str, int], pipeline: str) -> None:
    seen = run(two.make(**{"num_pages": 200, **pool, "pipeline": pipeline}), requests())
    assert seen.tokens == wanted.tokens
    assert seen.branches == wanted.branches
    assert len(seen.branches) == 2, "beside the first"
    assert (max(stats.preemptions for stats in seen.steps) > 0) == bool(pool)
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(seen, name)["told"], getattr(wanted, name)["told"]
        assert [t.logprob for t in ours] == pytest.approx([t.logprob for t in theirs], abs=1e-4)
        assert [[i for i, _ in t.top] for t in ours] == [[i for i, _ in t.top] for t in theirs]


def test_ids_are_those_of_one_rank_while_drafts_are_checked(two: Led, wanted: Seen) -> None:
    prompts = {request.request_id: request.token_ids for request in requests()}
    engine = guided(two.make(num_pages=200, pipeline="off"), texts_of(wanted, prompts), lies=4)
    seen = run(engine, requests())
    assert seen.tokens == wanted.tokens
    assert seen.branches == wanted.branches
    assert 0 < seen.steps[-1].accepted_tokens < seen.steps[-1].drafted_tokens


def test_a_prefix_is_cached_on_both_ranks(one: LoadedModel, two: Led) -> None:
    engine = two.make()
    run(engine, [EngineRequest("before", PROMPT[:40], greedy(1))])
    seen = run(engine, [EngineRequest("r", PROMPT, SEEDED)])
    assert seen.cached["r"] == 32
    assert seen.tokens["r"] == run(make_engine(one), [EngineRequest("r", PROMPT, SEEDED)]).tokens["r"]


def test_evicted_pages_come_back_on_both_ranks(one: LoadedModel, two: Led) -> None:
    asked = [EngineRequest(f"r{i}", prompt(100, start=i % 3), SEEDED) for i in range(6)]
    seen = Seen()
    engine = two.make(num_pages=12, reserve_tokens=0, kv_offload_gb=offload_gb(two.loaded.layout, 30))
    for request in asked:
        engine.submit(request)
        run_until_idle(engine, seen)
    assert seen.tokens == run(make_engine(one, num_pages=200), asked).tokens
    assert seen.steps[-1].restored_pages > 6
    assert seen.cached["r5"] == 96


def test_one_rank_and_two_share_pages_in_files(one: LoadedModel, two: Led, tmp_path: Path) -> None:
    """A file has the heads of both ranks, so each instance can use what the other one computed."""
    asked = [EngineRequest(f"r{i}", prompt(100, start=i), SEEDED) for i in range(2)]
    wanted = run(make_engine(one, num_pages=200), asked).tokens
    engines = [two.make(kv_store_dir=tmp_path), make_engine(one, kv_store_dir=tmp_path)]
    for saving, request in zip(engines, asked, strict=True):
        run(saving, [request])
        wait_until(lambda: saving.step().stats.saved_pages == 8)  # noqa: B023 - it is called within the loop
    for loading, request in zip(reversed(engines), asked, strict=True):
        seen = run(loading, [request])
        assert seen.cached[request.request_id] == 96
        assert seen.tokens[request.request_id] == wanted[request.request_id]


def test_each_rank_has_its_heads_of_the_pages_and_decode_goes_on_with_them(one: LoadedModel, two: Led) -> None:
    """Head-major pages: those of one rank are the parts of both ranks, one after the other."""
    whole, prefill, decode = make_engine(one), two.make(), two.make()
    computed = prefilled(prefill, "r", PROMPT, SEEDED)
    apart = prefilled(whole, "r", PROMPT, SEEDED)
    assert computed.first_token == apart.first_token
    pages = [read_page(prefill, page) for page in computed.pages]
    close = [same(ours, read_page(whole, page)) for ours, page in zip(pages, apart.pages, strict=True)]
    assert close == [True] * 4
    decode.submit(EngineRequest("r", PROMPT, SEEDED, Phase.DECODE))
    reserved = decode.step().reserved[0]
    for page, data in zip(reserved.pages, pages, strict=True):
        write_page(decode, page, data)
    assert computed.first_token is not None
    (first,) = decode.deliver("r", computed.first_token)
    rest = run_until_idle(decode, Seen()).tokens["r"]
    assert [*first.token_ids, *rest] == run(make_engine(one), [EngineRequest("r", PROMPT, SEEDED)]).tokens["r"]


def same(ours: bytes, theirs: bytes) -> bool:
    pairs = zip(memoryview(ours).cast("f"), memoryview(theirs).cast("f"), strict=True)
    return all(abs(a - b) < 1e-4 for a, b in pairs)


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_pages_add_up_and_tokens_are_right_whatever_happens(
    tiny: LoadedModel, two: Led, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lives of tests/engine/test_engine_stateful.py."""
    monkeypatch.setitem(PIPELINE, "pipeline", pipeline)
    run_machine(two.make, 6, alone_on(tiny), sizes=(16,))
