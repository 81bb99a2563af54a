"""The kernels under Triton's interpreter, without a GPU, compared with attention written out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.attention_case import LAYER, AttentionCase, Outcome
from engine.attention import triton_backend
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import StepLimits
from engine.attention.triton_backend import Tiles, TritonAttention
from engine.ports import EngineRequest
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, peek, prompt, run

SPLITTING = partial(TritonAttention, span=32, programs=8)
SPLITTING_HALF = partial(SPLITTING, span=64)  # blocks of keys are longer
WINDOWED, CAPPED, BOTH = Scoring(0.3, window=7), Scoring(0.3, softcap=2.0), Scoring(0.2, window=20, softcap=5.0)
DECODES = AttentionCase((1, 1, 1), (1, 17, 200))
CHUNKS = AttentionCase((5, 20), (70, 20))
MIXED = AttentionCase((1, 1, 20, 5), (4, 33, 20, 70))
# Two sizes of blocks, some split. Several key heads over split contexts are in MIXED and CHUNKS.
LONG = AttentionCase((1, 1, 2, 20, 5, 33), (3, 140, 80, 120, 90, 133), kv_heads=1)


@pytest.mark.parametrize("case", [DECODES, CHUNKS, MIXED, LONG], ids=["decodes", "chunks", "mixed", "long"])
@pytest.mark.parametrize("scoring", [Scoring(0.3), WINDOWED, CAPPED, BOTH], ids=["plain", "windowed", "capped", "both"])
@pytest.mark.parametrize("make", [TritonAttention, SPLITTING], ids=["whole", "split"])
def test_each_request_attends_to_what_it_sees_of_its_own_context(
    case: AttentionCase, scoring: Scoring, make: type[TritonAttention]
) -> None:
    Outcome(replace(case, scoring=scoring), make).check()


@pytest.mark.parametrize("scoring", [Scoring(0.3), BOTH], ids=["plain", "both"])
@pytest.mark.parametrize("span", [64, 512])
def test_sinks_join_the_softmax_without_a_value(scoring: Scoring, span: int) -> None:
    make = partial(TritonAttention, span=span)
    Outcome(replace(LONG, scoring=scoring, sinks=True, kv_heads=2), make).check()
    Outcome(replace(LONG, scoring=scoring, sinks=True, dtype="bfloat16", group=8), make).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_right_to_its_rounding(dtype: str) -> None:
    Outcome(replace(MIXED, dtype=dtype, scoring=BOTH), SPLITTING_HALF).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 32, "head_dim": 80},
        {"page_size": 64, "head_dim": 96},
        {"page_size": 128, "head_dim": 64},
        {"group": 1, "kv_heads": 4},
        {"group": 20, "kv_heads": 1},
        {"head_dim": 256, "kv_heads": 1, "group": 2},
    ],
    ids=str,
)
def test_page_sizes_head_sizes_and_ways_of_sharing_keys(changes: dict[str, int]) -> None:
    Outcome(replace(MIXED, **changes), SPLITTING).check()


@settings(max_examples=12, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 90), max_size=3).map(sorted),
    chunks=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 50)), max_size=2),
    window=st.sampled_from([0, 1, 16, 33]),
    page_size=st.sampled_from([16, 32]),
    span=st.sampled_from([32, 64, 512]),
)
def test_any_step(decodes: list[int], chunks: list[tuple[int, int]], window: int, page_size: int, span: int) -> None:
    if decodes or chunks:
        query_lens = (*(1 for _ in decodes), *(length for length, _ in chunks))
        context_lens = (*decodes, *(length + cached for length, cached in chunks))
        case = AttentionCase(query_lens, context_lens, Scoring(0.3, window), page_size=page_size, kv_heads=1, group=2)
        Outcome(case, partial(TritonAttention, span=span, programs=3)).check()


def test_chunks_longer_than_a_block_of_queries() -> None:
    tiles = Tiles(16, 4, 2, 32, 16, 4, 2)
    case = AttentionCase((70, 33), (150, 33), Scoring(0.3, window=40), kv_heads=1, group=2)
    Outcome(case, partial(TritonAttention, tiles=tiles)).check()


@pytest.mark.parametrize(
    ("changes", "make"),
    [({"scoring": BOTH, "sinks": True}, SPLITTING), ({"dtype": "bfloat16"}, SPLITTING_HALF)],
    ids=["float32 with all", "bfloat16"],
)
def test_a_request_gets_the_same_bits_alone_and_in_any_batch(
    changes: dict[str, Any], make: Callable[..., TritonAttention]
) -> None:
    """A decode's spans depended on the batch size, and a short chunk's blocks on the longest chunk."""
    case = replace(LONG, **changes)
    together = Outcome(case, make)
    before, first = together.before, 0
    for length, context, table in zip(LONG.query_lens, LONG.context_lens, together.tables, strict=True):
        new = slice(first, first + length)
        query, key, value = (x[:, :, new] for x in (together.query, together.key, together.value))
        alone = make(before.clone(), case.layout, case.group, case.limits)
        step = alone.plan(StepShape([length], [context], [table]))
        out = step.attend(LAYER, query, key, value, case.scoring, sinks=together.sinks)
        assert torch.equal(out, together.out[:, new]), f"{length} of {context}"
        first += length


def test_partial_results_of_prompts_take_no_more_memory_than_one_launch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    several_heads = replace(LONG, kv_heads=2)
    whole = Outcome(several_heads, SPLITTING)
    monkeypatch.setattr(triton_backend, "PARTIAL_BYTES", 1)
    cut = Outcome(several_heads, SPLITTING)
    assert isinstance(cut.backend, TritonAttention)
    filled = cut.backend.plan(StepShape(LONG.query_lens, LONG.context_lens, cut.tables)).filled
    assert filled is not None
    assert len(filled.prompts) > 4
    assert torch.equal(cut.out, whole.out)
    cut.check()


def test_a_step_with_more_spans_than_graphs_have_memory_for_is_not_replayed() -> None:
    """Contexts that share pages may together be longer than the pool."""
    outcome = Outcome(replace(DECODES, context_lens=(160, 170, 180)), SPLITTING)
    assert isinstance(outcome.backend, TritonAttention)
    pool, layout = outcome.pool[:3], DECODES.layout  # 48 tokens: one span, and four times that for the rows' contexts
    backend = SPLITTING(pool, layout, DECODES.group, StepLimits(4, 4, 180))
    for contexts, fits in (([32, 32, 64], True), ([64, 64, 64], True), ([64, 96, 96], False)):
        tables = [[0] * layout.pages_for(context) for context in contexts]
        assert backend.plan(StepShape([1] * 3, contexts, tables)).replayable is fits
    assert not backend.plan(StepShape([2], [2], [[0]])).replayable


def test_rows_without_a_request_write_nothing_and_come_out_as_zeros() -> None:
    """A graph for 8 decodes runs 3: the other rows hold data of earlier steps."""
    limits = StepLimits(8, 8, 200)
    make = partial(TritonAttention, span=32)
    outcome = Outcome(DECODES, lambda pool, layout, group, _limits, **more: make(pool, layout, group, limits, **more))
    backend, pool = outcome.backend, outcome.pool
    backend.plan(StepShape([1] * 8, [1] * 8, [[page] for page in range(8)]))
    backend.plan(StepShape(DECODES.query_lens, DECODES.context_lens, outcome.tables))
    new = (outcome.query, outcome.key, outcome.value)
    query, key, value = (torch.cat([x, torch.randn(1, x.shape[1], 5, 16)], 2) for x in new)
    before = pool.clone()
    assert isinstance(backend, TritonAttention)
    out = backend.recorded(8).attend(LAYER, query, key, value, DECODES.scoring)
    assert torch.equal(pool, before)
    assert torch.allclose(out[:, :3], outcome.out, atol=1e-6)
    assert out[:, 3:].eq(0).all()


@pytest.mark.parametrize("make", [TritonAttention, SPLITTING], ids=["whole", "split"])
def test_a_recorded_step_reads_the_tables_of_whichever_step_was_planned_last(make: type[TritonAttention]) -> None:
    outcome = Outcome(replace(DECODES, context_lens=(20, 30, 140)), make)
    assert isinstance(outcome.backend, TritonAttention)
    recorded = outcome.backend.recorded(3)
    new = (outcome.query, outcome.key, outcome.value)
    first = recorded.attend(LAYER, *new, Scoring(0.3))
    assert torch.equal(first, outcome.out)
    shape = StepShape([1, 1, 1], [10, 30, 130], [*outcome.tables[1::-1], outcome.tables[2]])
    planned = outcome.backend.plan(shape).attend(LAYER, *new, Scoring(0.3))
    assert not torch.allclose(planned, first)
    assert torch.equal(recorded.attend(LAYER, *new, Scoring(0.3)), planned)


def test_an_engine_gives_the_same_greedy_ids_as_on_the_cpu_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunked prompts, decodes among them, a prefix hit, contexts of several spans, windows and sinks."""
    monkeypatch.setitem(TritonAttention.__init__.__kwdefaults__, "span", 32)
    config = FAMILIES["gpt-oss"]()
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    loaded = load_tiny(save_model(tmp_path, config))
    shared = prompt(40)
    requests = [EngineRequest("a", shared, greedy(4)), EngineRequest("b", prompt(7, start=3), greedy(4))]
    later = [EngineRequest("c", [*shared, 9, 10], greedy(4))]
    tokens = []
    for attention in ("triton", "torch"):
        engine = make_engine(loaded, attention=attention, max_step_tokens=24)
        tokens.append([run(engine, requests).tokens, run(engine, later).tokens])
        assert peek(engine, [*shared, 9]) == 32
    assert tokens[0] == tokens[1]
