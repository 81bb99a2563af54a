"""Experts and fused projections over two ranks give the ids of one, whatever else is in the batch (fp32)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from components.wire.sampling import SamplingParams
from engine.cpu.thread_limit import ThreadLimit
from engine.ports import EngineRequest
from engine.sharding.experts import has_experts
from tests.engine.lora.lora_files import save_adapter
from tests.engine.model.families import FAMILIES, reference, reference_greedy, save_model
from tests.engine.parallel.led import Led, led
from tests.engine.tiny_engine import Seen, greedy, load_tiny, make_engine, prompt, run

PROMPT = prompt(53)
SEEDED = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)
ADAPTED = {"qwen3-moe": ("q_proj", "o_proj"), "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}


@dataclass(frozen=True)
class Case:
    directory: Path
    two: Led
    wanted: Seen  # what one rank gives


@pytest.fixture(scope="module", params=ADAPTED)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel: str | None
) -> Iterator[Case]:
    home = tmp_path_factory.mktemp("over-ranks")
    directory = save_model(home / request.param, FAMILIES[request.param]())
    lora = {"own": str(save_adapter(home / "adapter", directory, 1, targets=ADAPTED[request.param]))}
    with led(directory, 2, lora=lora) as two:
        assert has_experts(two.loaded.module) == (request.param == "qwen3-moe")
        one = load_tiny(directory, lora=lora)
        yield Case(directory, two, run(make_engine(one, num_pages=200), requests()))


def requests() -> list[EngineRequest]:
    """Chunked prompts beside decodes, greedy and seeded, with an adapter and without."""
    return [
        *(EngineRequest(f"chunk{i}", prompt(40 + 30 * i, start=i), greedy(20, ignore_eos=True)) for i in range(3)),
        EngineRequest("adapted", PROMPT, SEEDED, adapter="own"),
        EngineRequest("seeded", PROMPT, structs.replace(SEEDED, seed=5)),
        EngineRequest("branched", prompt(33, start=5), structs.replace(SEEDED, n=3, seed=6)),
        EngineRequest("moved", prompt(60, start=7), SEEDED, num_generated=11),
    ]


@pytest.mark.parametrize("pipeline", ["off", "on"])
@pytest.mark.parametrize("pool", [{}, {"num_pages": 24, "reserve_tokens": 0}], ids=["room for all", "preempting"])
def test_ids_are_those_of_one_rank(case: Case, pool: dict[str, int], pipeline: str) -> None:
    seen = run(case.two.make(**{"num_pages": 200, **pool, "pipeline": pipeline}), requests())
    assert seen.tokens == case.wanted.tokens
    assert seen.branches == case.wanted.branches
    assert (max(stats.preemptions for stats in seen.steps) > 0) == bool(pool)


def test_ids_are_those_of_transformers_after_a_prefix_hit(case: Case) -> None:
    engine = case.two.make()
    run(engine, [EngineRequest("before", PROMPT[:40], greedy(1))])
    seen = run(engine, [EngineRequest("r", PROMPT, greedy(24))])
    assert seen.cached["r"] == 32
    assert seen.tokens["r"] == reference_greedy(reference(case.directory), PROMPT, 24)


def test_ranks_that_route_never_change_their_threads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's last bits depend on them: if ranks disagree about a token, an expert is added twice or never."""
    made: list[int] = []

    def limit(threads: int, decode_threads: int) -> ThreadLimit:
        made.append(threads)
        return ThreadLimit(threads, decode_threads)

    monkeypatch.setattr("engine.build.ThreadLimit", limit)
    case.two.make()
    assert (made == []) == has_experts(case.two.loaded.module)
