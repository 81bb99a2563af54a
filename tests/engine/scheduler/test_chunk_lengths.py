"""A prompt is never computed by a chunk of one token, unless it has one: its logits would have other bits."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase
from engine.runner.step_runner import Launched
from engine.scheduler import scheduler
from engine.scheduler.request import Chunk
from engine.scheduler.scheduler import chunk_length
from engine.scheduler.step_cost import FIRST_CHUNK_TOKENS, ChunkLimit
from tests.engine.embedding_model import save_embedding_model
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import GENERATING, check_pages, greedy, load_tiny, make_engine, peek, prompt, run


@given(st.integers(1, 300), st.lists(st.integers(1, 40), max_size=200))
def test_no_chunk_is_one_token_and_none_leaves_one(prompt_len: int, budgets: list[int]) -> None:
    left = prompt_len
    for budget in [*budgets, *[3] * 300]:
        length = chunk_length(left, budget)
        assert 0 <= length <= budget
        assert length != 1 or prompt_len == 1
        assert left - length != 1
        assert length or budget < 3, "three tokens are enough to get on"
        left -= length
        if not left:
            return
    raise AssertionError("it never ends")


def watched(engine: EngineCore) -> list[Chunk]:
    """Record the chunks that the engine computes."""
    chunks: list[Chunk] = []
    launch = engine._runner.launch

    def launched(planned: Sequence[Chunk]) -> Launched:
        chunks.extend(planned)
        return launch(planned)

    engine._runner.launch = launched  # type: ignore[method-assign, assignment]
    return chunks


def lonely(chunks: Sequence[Chunk]) -> list[tuple[str, int, int]]:
    """Return chunks of single tokens of longer prompts."""
    return [
        (chunk.request.id, chunk.start, chunk.request.prompt_len)
        for chunk in chunks
        if chunk.length == 1 and chunk.start < chunk.request.prompt_len and chunk.request.prompt_len > 1
    ]


def test_a_chunk_with_log_probabilities_is_short(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a row of logits for each token, without memory for them, and all streams of the step failed."""
    monkeypatch.setattr(scheduler, "MAX_LOGPROBS_CHUNK", 20)
    engine = make_engine(tiny, max_step_tokens=100)
    chunks = watched(engine)
    run(engine, [EngineRequest("reads", prompt(51), greedy(1, prompt_logprobs=1))])
    run(engine, [EngineRequest("plain", prompt(51, start=1), greedy(1))])
    assert [(chunk.request.id, chunk.length) for chunk in chunks] == [
        *(("reads", n) for n in (20, 20, 11)),
        ("plain", 51),
    ]


def test_an_embeddings_chunk_is_as_long_as_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean reads the states of all tokens, and the largest step has room for them."""
    monkeypatch.setattr(scheduler, "MAX_LOGPROBS_CHUNK", 20)
    engine = make_engine(load_tiny(save_embedding_model(tmp_path, "mean_tokens")), max_step_tokens=100)
    chunks = watched(engine)
    run(engine, [EngineRequest("pooled", prompt(51), greedy(1), Phase.EMBED)])
    assert [chunk.length for chunk in chunks] == [51]


@pytest.mark.parametrize("seed", range(12))
def test_it_holds_beside_decodes_behind_prefix_hits_after_preemptions_and_for_branches(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    running = draw.choice([1, 3, 9])
    engine = make_mock(
        tmp_path,
        num_pages=draw.choice([24, 60]),
        max_running=running,
        max_step_tokens=running + draw.choice([2, 3, 7, 30]),
        reserve_tokens=0,
        pipeline=draw.choice(["on", "off"]),
    )
    if draw.random() < 0.5:  # like on a CPU
        engine._chunk_limit = ChunkLimit(0.04)
    chunks = watched(engine)
    shared = prompt(160)
    for i in range(30):
        length = draw.choice([1, 2, 16, 17, 18, 32, 33, 34, draw.randint(1, 120)])
        tokens = shared[:length] if draw.random() < 0.6 else prompt(length, start=i)
        phase = draw.choice([Phase.FULL, Phase.FULL, Phase.PREFILL])
        sampling = SamplingParams(max_tokens=draw.randint(1, 40), seed=i, ignore_eos=True, n=draw.choice([1, 1, 3]))
        engine.submit(EngineRequest(f"r{i}", tokens, sampling, phase))
        for _ in range(draw.randrange(4)):
            for computed in engine.step().computed:
                if computed.first_token is not None:
                    engine.release(computed.request_id)
            check_pages(engine)
    while engine.has_work():
        for computed in engine.step().computed:
            if computed.first_token is not None:
                engine.release(computed.request_id)
        check_pages(engine)
    assert lonely(chunks) == []
    assert len({chunk.request.id for chunk in chunks}) == 30


@pytest.mark.parametrize("phase", GENERATING)
def test_a_prefix_hit_leaves_two_tokens_at_least(tiny: LoadedModel, phase: Phase) -> None:
    """Of 33 tokens whose first two pages are cached, the second page is computed once more."""
    engine = make_engine(tiny)
    run(engine, [EngineRequest("before", prompt(50), greedy(1))])
    for length, cached in ((1, 0), (16, 0), (17, 0), (18, 16), (32, 16), (33, 16), (34, 32), (50, 48)):
        assert peek(engine, prompt(length)) == cached
    engine.submit(EngineRequest("r", prompt(33), greedy(3, ignore_eos=True), phase))
    chunks = watched(engine)
    output = engine.step()
    if phase is Phase.DECODE:
        assert output.reserved[0].num_computed == 16
    else:
        assert [(chunk.start, chunk.end) for chunk in chunks] == [(16, 33)]


def test_the_limit_of_a_chunk_beside_decodes_leaves_no_single_token(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_step_tokens=512)
    engine.submit(EngineRequest("talks", prompt(5), greedy(20, ignore_eos=True)))
    engine.step()
    chunks = watched(engine)
    engine.submit(EngineRequest("reads", prompt(FIRST_CHUNK_TOKENS + 1, start=1), greedy(1)))
    engine.step()
    engine.step()
    assert [chunk.length for chunk in chunks if chunk.request.id == "reads"] == [FIRST_CHUNK_TOKENS - 1, 2]
