"""A request's ids are its own: what else is in the batch, in the cache or in the way changes none of them (fp32)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Exposed, Phase
from tests.engine.tiny_engine import alone, greedy, make_engine, prompt, read_page, run, run_until_idle, write_page

pytestmark = pytest.mark.usefixtures("pipeline")

PROMPT = prompt(53)
SAMPLINGS = {
    "greedy": greedy(40, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True),
}


@dataclass(frozen=True)
class Situation:
    """What an engine is like, and what it has done, when the request comes."""

    config: dict[str, Any] = field(default_factory=dict)
    cached: Sequence[int] = ()  # a prompt that was computed before
    others: int = 0  # requests that came just before
    preempts: bool = False


SITUATIONS = {
    "alone": Situation(),
    "among 31 others": Situation({"max_running": 32, "num_pages": 300, "max_step_tokens": 100}, others=31),
    "behind a short prefix hit": Situation(cached=PROMPT[:20]),
    "behind a long prefix hit": Situation(cached=[*PROMPT, *prompt(9, start=3)]),
    "preempted": Situation({"num_pages": 12, "reserve_tokens": 0}, others=4, preempts=True),
    "preempted, in small chunks": Situation(
        {"num_pages": 12, "reserve_tokens": 0, "max_running": 5, "max_step_tokens": 7}, others=4, preempts=True
    ),
} | {
    f"in chunks of {size}": Situation({"max_running": 1, "max_step_tokens": size})
    for size in (3, 7, 15, 16, 17, 31, 48, 52, 53, 54)
}


def prepared(tiny: LoadedModel, situation: Situation) -> EngineCore:
    """An engine with the others in its queue; they draw, penalise and end in all sorts of ways."""
    engine = make_engine(tiny, **situation.config)
    if situation.cached:
        run(engine, [EngineRequest("before", situation.cached, greedy(1))])
    for i in range(situation.others):
        sampling = SamplingParams(max_tokens=30 + i, temperature=0.4 * (i % 4), seed=i, frequency_penalty=0.3 * (i % 3))
        engine.submit(EngineRequest(f"other{i}", prompt(5 + 2 * i, start=i + 1), sampling))
    return engine


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_request_gives_the_ids_it_gives_alone(
    tiny: LoadedModel, situation: Situation, sampling: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    engine = prepared(tiny, situation)
    with caplog.at_level(logging.INFO, logger="engine.scheduler.scheduler"):
        seen = run(engine, [EngineRequest("r", PROMPT, sampling)])
    assert seen.tokens["r"] == alone(tiny, PROMPT, sampling, max_step_tokens=512, pipeline="off")
    assert ("r" in preempted(caplog)) == situation.preempts
    assert seen.cached["r"] == min(len(situation.cached), 52) // 16 * 16
    if situation.others == 31:
        assert max(stats.num_running for stats in seen.steps) >= 30, "one or two may have ended by then"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_prefill_here_and_decode_there_give_the_ids_of_one_engine(
    tiny: LoadedModel, situation: Situation, sampling: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="engine.scheduler.scheduler"):
        ids = by_two_engines(prepared(tiny, situation), prepared(tiny, situation), sampling)
    assert ids == alone(tiny, PROMPT, sampling, max_step_tokens=512, pipeline="off")
    assert ("r" in preempted(caplog)) == situation.preempts


def by_two_engines(prefill: EngineCore, decode: EngineCore, sampling: SamplingParams) -> list[int]:
    """Return the ids for PROMPT that `decode` gives with the pages of `prefill`. Each may have requests already."""
    computed = computed_by(prefill, EngineRequest("r", PROMPT, sampling, Phase.PREFILL))
    decode.submit(EngineRequest("r", PROMPT, sampling, Phase.DECODE))
    reserved = None
    while reserved is None:
        reserved = next(iter(decode.step().reserved), None)
    for source, target in list(zip(computed.pages, reserved.pages, strict=True))[
        reserved.num_computed // decode.kv_region.layout.page_size :
    ]:
        write_page(decode, target, read_page(prefill, source))
    assert computed.first_token is not None
    (first,) = decode.deliver("r", computed.first_token)
    return [*first.token_ids, *run_until_idle(decode).tokens["r"]]


def computed_by(engine: EngineCore, request: EngineRequest) -> Exposed:
    return run(engine, [request]).computed[request.request_id][-1]


def preempted(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {vars(record)["request_id"] for record in caplog.records if record.msg == "request preempted"}
