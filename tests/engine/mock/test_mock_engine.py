"""The mock answers like an engine, and notices missing KV."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from components.errors import UnknownModel
from components.wire.sampling import SamplingParams, branch_seed
from engine.core.engine_core import EngineCore
from engine.errors import ModelUnavailable
from engine.mock.marked_pages import MARKS
from engine.model.mock_model import SPECIAL
from engine.model.resolve import model_dir, served_name
from engine.ports import EngineRequest, FinishReason, Phase
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import (
    GENERATING,
    Seen,
    check_pages,
    greedy,
    peek,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")

DRAWN = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)


@pytest.fixture
def mock(tmp_path: Path) -> EngineCore:
    return make_mock(tmp_path)


def endless(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, ignore_eos=True)


def alone(home: Path, ids: list[int], sampling: SamplingParams, **changes: object) -> list[int]:
    return run(make_mock(home, **changes), [EngineRequest("alone", ids, sampling)]).tokens["alone"]


def test_neither_torch_nor_transformers_is_imported_on_its_way(tmp_path: Path) -> None:
    """Nor by the loop of a worker: a mock worker starts at once."""
    script = (
        "import asyncio, sys, time; from pathlib import Path\n"
        "from engine.start import start_engine; from engine.config import EngineConfig\n"
        "async def main():\n"
        "    async with start_engine('mock', EngineConfig(num_pages=8), Path(sys.argv[1])) as loop:\n"
        "        assert loop.stats.total_pages == 8\n"
        "asyncio.run(main())\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_request_gives_the_same_alone_in_company_and_in_other_chunks(tmp_path: Path) -> None:
    requests = [EngineRequest(f"r{i}", prompt(20 + 7 * i, start=i), endless(30)) for i in range(10)]
    seen = run(make_mock(tmp_path, max_step_tokens=18, max_running=16), requests)
    for request in requests:
        expected = alone(tmp_path, list(request.token_ids), request.sampling, max_step_tokens=200)
        assert seen.tokens[request.request_id] == expected


def test_preemption_and_prefix_hits_change_no_token(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, num_pages=16, reserve_tokens=0)
    requests = [EngineRequest(f"r{i}", prompt(33) + prompt(i, start=9), endless(80)) for i in range(6)]
    seen = run(engine, requests)
    assert seen.steps[-1].preemptions > 0
    assert seen.steps[-1].prefix_hits > 0
    for request in requests:
        assert seen.tokens[request.request_id] == alone(tmp_path, list(request.token_ids), request.sampling)


def test_a_text_that_goes_on_elsewhere_from_its_tokens_is_the_same(tmp_path: Path) -> None:
    whole = alone(tmp_path, prompt(50), DRAWN)
    rest = SamplingParams(max_tokens=40 - 13, temperature=1.0, seed=7, ignore_eos=True)
    assert alone(tmp_path, prompt(50) + whole[:13], rest) == whole[13:]


def test_an_adapter_has_answers_and_prefixes_of_its_own_whatever_it_is_called(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, lora={"legal": "one", "medical": "two", "law": "one"})
    names = ("", "legal", "medical", "law")
    seen = run(engine, [EngineRequest(name or "none", prompt(40), endless(70), adapter=name) for name in names])
    assert seen.tokens["none"] == alone(tmp_path, prompt(40), endless(70))
    assert seen.tokens["legal"] == seen.tokens["law"], "the same under two names"
    assert len({tuple(made) for made in seen.tokens.values()}) == 3
    assert [peek(engine, prompt(60), adapter=name) for name in names] == [32, 32, 32, 32]
    run(engine, [EngineRequest("longer", prompt(60), endless(3), adapter="legal")])
    assert [peek(engine, prompt(60), adapter=name) for name in names] == [32, 48, 32, 48]
    branched = run(engine, [EngineRequest("n", prompt(40), greedy(70, ignore_eos=True, n=2), adapter="legal")])
    assert branched.branches["n", 1] == branched.tokens["n"] == seen.tokens["legal"]
    with pytest.raises(UnknownModel, match="loaded here: law, legal, medical"):
        engine.submit(EngineRequest("r", prompt(5), endless(2), adapter="x"))


def test_kv_of_another_adapter_is_noticed(tmp_path: Path) -> None:
    """Its pages hold other marks, so the answer is not the one that this adapter gives."""
    engine = make_mock(tmp_path, lora={"legal": "one", "medical": "two"})
    expected = run(engine, [EngineRequest("alone", prompt(40), endless(20), adapter="legal")]).tokens["alone"]
    made = {}
    for source in ("legal", "medical"):
        computed = run(engine, [EngineRequest("p", prompt(40), endless(20), Phase.PREFILL, adapter=source)]).computed
        decode = make_mock(tmp_path, lora={"legal": "one"})
        told = run(decode, [EngineRequest("d", prompt(40), endless(20), Phase.DECODE, adapter="legal")]).reserved["d"]
        for page, target in zip(computed["p"][-1].pages, told.pages, strict=True):
            write_page(decode, target, read_page(engine, page))
        engine.release("p")
        decode.deliver("d", expected[0])
        made[source] = [expected[0], *run_until_idle(decode).tokens["d"]]
    assert made["legal"] == expected
    assert made["medical"] != expected


def test_the_seed_matters_when_drawing_and_only_then(tmp_path: Path) -> None:
    other = SamplingParams(max_tokens=40, temperature=1.0, seed=8, ignore_eos=True)
    assert alone(tmp_path, prompt(50), DRAWN) != alone(tmp_path, prompt(50), other)
    frozen = [SamplingParams(max_tokens=40, temperature=0, seed=seed, ignore_eos=True) for seed in (1, 2)]
    assert alone(tmp_path, prompt(50), frozen[0]) == alone(tmp_path, prompt(50), frozen[1])


def test_an_answer_has_as_many_tokens_as_were_asked_for_at_least(tmp_path: Path) -> None:
    for seed in range(6):
        engine = make_mock(tmp_path, {"answer_tokens": 8})
        sampling = SamplingParams(max_tokens=40, min_tokens=30, seed=seed)
        seen = run(engine, [EngineRequest("r", prompt(5 + seed), sampling)])
        assert len(seen.tokens["r"]) >= 30


def test_every_token_of_the_prompt_matters(tmp_path: Path) -> None:
    ids = prompt(100)
    assert alone(tmp_path, ids, endless(9)) != alone(tmp_path, [ids[0] + 1, *ids[1:]], endless(9))


def test_moved_pages_go_on_as_if_computed_here(tmp_path: Path) -> None:
    there, here = make_mock(tmp_path), make_mock(tmp_path)
    computed = prefilled(there, "p", prompt(40), endless(30))
    here.submit(EngineRequest("d", prompt(40), endless(30), Phase.DECODE))
    [reserved] = here.step().reserved
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(here, target, read_page(there, source))
    assert computed.first_token is not None
    [first] = here.deliver("d", computed.first_token)
    seen = run_until_idle(here)
    assert first.token_ids + seen.tokens["d"] == alone(tmp_path, prompt(40), endless(30))


@pytest.mark.parametrize("keep", [0, 8], ids=["nothing arrived", "the end is missing"])
def test_pages_that_did_not_arrive_whole_fail_the_request(tmp_path: Path, keep: int) -> None:
    there, here = make_mock(tmp_path), make_mock(tmp_path)
    computed = prefilled(there, "p", prompt(40), endless(30))
    here.submit(EngineRequest("d", prompt(40), endless(30), Phase.DECODE))
    [reserved] = here.step().reserved
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        page = read_page(there, source)
        write_page(here, target, page[:keep].ljust(len(page), b"\0"))
    here.deliver("d", computed.first_token or 0)
    assert "should contain 8 tokens" in run_until_idle(here).failed["d"].error.message
    check_pages(here)


def test_another_prompts_pages_give_other_tokens(tmp_path: Path) -> None:
    there, here = make_mock(tmp_path), make_mock(tmp_path)
    computed = prefilled(there, "p", prompt(40, start=1), endless(30))
    here.submit(EngineRequest("d", prompt(40), endless(30), Phase.DECODE))
    [reserved] = here.step().reserved
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(here, target, read_page(there, source))
    here.deliver("d", alone(tmp_path, prompt(40), endless(1))[0])
    assert run_until_idle(here).tokens["d"] != alone(tmp_path, prompt(40), endless(30))[1:]


def test_answers_end_by_themselves_unless_told_to_go_on(tmp_path: Path) -> None:
    engine = make_mock(tmp_path, {"answer_tokens": 10}, num_pages=4096)
    seen = run(engine, [EngineRequest(f"r{i}", prompt(9, start=i), greedy(500)) for i in range(200)])
    lengths = [len(tokens) for tokens in seen.tokens.values()]
    assert 7 < sum(lengths) / len(lengths) < 14
    assert set(seen.finish.values()) == {FinishReason.STOP}
    assert all(tokens[-1] == SPECIAL["<|im_end|>"] for tokens in seen.tokens.values())


def test_a_step_takes_as_long_as_the_cost_model_says(tmp_path: Path, pipeline: str) -> None:
    mock = {"speedup": 2.0, "step_s": 0.04, "decode_s": 0, "context_token_s": 0, "prompt_token_s": 0}
    engine = make_mock(tmp_path, mock)
    started = time.perf_counter()
    seen = run(engine, [EngineRequest("r", prompt(10), endless(5))])
    assert time.perf_counter() - started >= 5 * 0.02
    if pipeline == "off":
        assert all(stats.step_s >= 0.02 for stats in seen.steps)


def test_a_mock_of_gpt2_reads_its_names_and_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    config = {"n_layer": 5, "n_head": 8, "n_embd": 256, "vocab_size": 1000, "n_positions": 300}
    path, shape = tmp_path / "config.json", {"layers": None, "kv_heads": None, "head_dim": None}
    path.write_text(json.dumps(config))
    engine = make_mock(tmp_path, shape, model=f"mock:{tmp_path}")
    layout = engine.kv_region.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, engine.max_context) == (5, 8, 32, 300)
    path.write_text(json.dumps({**config, "n_positions": None}))
    assert make_mock(tmp_path, shape, model=f"mock:{tmp_path}").max_context > 300, "as many as the pages hold"
    path.write_text(json.dumps({**config, "n_head": 0}))
    with pytest.raises(ModelUnavailable, match="num_attention_heads is 0; it must be a positive integer"):
        make_mock(tmp_path, shape, model=f"mock:{tmp_path}")


def test_a_mock_of_a_model_has_its_shape(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 300,
        "eos_token_id": [3, 4],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    from_model = make_mock(tmp_path, {"layers": None, "kv_heads": None, "head_dim": None}, model=f"mock:{tmp_path}")
    layout = from_model.kv_region.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (5, 2, 32, "bfloat16")
    assert layout.model == f"mock:{tmp_path.name}, marks {MARKS}"
    assert from_model.max_context == 300
    tokens = run(from_model, [EngineRequest("r", [999], endless(200))]).tokens["r"]
    assert max(tokens) > 300
    assert not {3, 4} & set(tokens)


def test_names(tmp_path: Path) -> None:
    assert served_name("mock") == "mock"
    assert served_name("mock:smollm2-135m") == "mock:smollm2-135m"
    assert served_name(f"mock:{tmp_path}") == f"mock:{tmp_path.name}"
    assert model_dir("mock", tmp_path) == tmp_path / "models" / "mock"


def test_cancelled_and_released_requests_leave_no_page_behind(mock: EngineCore) -> None:
    seen = Seen()
    for i, phase in enumerate([*GENERATING] * 4):
        mock.submit(EngineRequest(f"r{i}", prompt(30, start=i), endless(50), phase))
    for i in range(12):
        seen.take(mock.step())
        mock.cancel(f"r{i}")
        mock.release(f"r{i}")
        check_pages(mock)
    run_until_idle(mock, seen)
    stats = mock.step().stats
    assert (stats.held_pages, stats.num_held) == (0, 0)


@pytest.mark.parametrize("length", [1, 16, 17, 33])
def test_branches_of_a_prompt_are_requests_with_derived_seeds(tmp_path: Path, length: int) -> None:
    engine = make_mock(tmp_path)
    seen = run(engine, [EngineRequest("r", prompt(length), replace(DRAWN, n=3))])
    found = [seen.tokens["r"], seen.branches["r", 1], seen.branches["r", 2]]
    assert found == [alone(tmp_path, prompt(length), replace(DRAWN, seed=branch_seed(7, i))) for i in range(3)]
    assert engine.step().stats.held_pages == 0
