"""The kernels under Triton's interpreter, against attention written out. No GPU has a part in this."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.attention_case import LAYER, AttentionCase, Outcome
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import StepLimits
from engine.attention.triton_backend import Tiles, TritonAttention
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.tiny_engine import greedy, make_engine, peek, prompt, run

SPLITTING = partial(TritonAttention, programs=256)
WINDOWED, CAPPED, BOTH = Scoring(0.3, window=7), Scoring(0.3, softcap=2.0), Scoring(0.2, window=20, softcap=5.0)
DECODES = AttentionCase((1, 1, 1), (1, 17, 200))
CHUNKS = AttentionCase((5, 20), (70, 20))
MIXED = AttentionCase((1, 1, 20, 5), (4, 33, 20, 70))


@pytest.mark.parametrize("case", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("scoring", [Scoring(0.3), WINDOWED, CAPPED, BOTH], ids=["plain", "windowed", "capped", "both"])
@pytest.mark.parametrize("make", [TritonAttention, SPLITTING], ids=["whole", "split"])
def test_each_request_attends_to_what_it_sees_of_its_own_context(
    case: AttentionCase, scoring: Scoring, make: type[TritonAttention]
) -> None:
    Outcome(replace(case, scoring=scoring), make).check()


@pytest.mark.parametrize("scoring", [Scoring(0.3), BOTH], ids=["plain", "both"])
@pytest.mark.parametrize("make", [TritonAttention, SPLITTING], ids=["whole", "split"])
def test_sinks_join_the_softmax_without_a_value(scoring: Scoring, make: type[TritonAttention]) -> None:
    Outcome(replace(MIXED, scoring=scoring, sinks=True), make).check()
    Outcome(replace(MIXED, scoring=scoring, sinks=True, dtype="bfloat16", group=8), make).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_right_to_its_rounding(dtype: str) -> None:
    Outcome(replace(MIXED, dtype=dtype, scoring=BOTH), SPLITTING).check()


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
    programs=st.sampled_from([1, 8, 64]),
)
def test_any_step(
    decodes: list[int], chunks: list[tuple[int, int]], window: int, page_size: int, programs: int
) -> None:
    if decodes or chunks:
        query_lens = (*(1 for _ in decodes), *(length for length, _ in chunks))
        context_lens = (*decodes, *(length + cached for length, cached in chunks))
        case = AttentionCase(query_lens, context_lens, Scoring(0.3, window), page_size=page_size, kv_heads=1, group=2)
        Outcome(case, partial(TritonAttention, programs=programs)).check()


def test_chunks_longer_than_a_block_of_queries() -> None:
    tiles = Tiles(16, 4, 2, 32, 16, 4, 2)
    case = AttentionCase((70, 33), (150, 33), Scoring(0.3, window=40), kv_heads=1, group=2)
    Outcome(case, partial(TritonAttention, tiles=tiles)).check()


def test_a_few_decodes_are_split_to_fill_the_device_and_many_are_not() -> None:
    outcome = Outcome(DECODES, partial(TritonAttention, programs=528))
    assert isinstance(outcome.backend, TritonAttention)
    splits = [
        outcome.backend._splits(rows, context) for rows, context in ((1, 200), (1, 40000), (16, 40000), (300, 40000))
    ]
    assert splits == [4, 64, 16, 1]


def test_rows_without_a_request_write_nothing_and_come_out_as_zeros() -> None:
    """A graph for 8 decodes runs 3; what another step left in the rows behind them must not be attended to."""
    limits = StepLimits(8, 8, 200)
    make = partial(TritonAttention, programs=64)
    outcome = Outcome(DECODES, lambda pool, layout, group, _limits: make(pool, layout, group, limits))
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


def test_a_recorded_step_reads_the_tables_of_whichever_step_was_planned_last() -> None:
    outcome = Outcome(replace(DECODES, context_lens=(20, 30, 40)), TritonAttention)
    assert isinstance(outcome.backend, TritonAttention)
    recorded = outcome.backend.recorded(3)
    new = (outcome.query, outcome.key, outcome.value)
    first = recorded.attend(LAYER, *new, Scoring(0.3))
    assert torch.equal(first, outcome.out)
    shape = StepShape([1, 1, 1], [10, 20, 30], outcome.tables[::-1])
    planned = outcome.backend.plan(shape).attend(LAYER, *new, Scoring(0.3))
    assert not torch.allclose(planned, first)
    assert torch.equal(recorded.attend(LAYER, *new, Scoring(0.3)), planned)


def test_an_engine_gives_the_same_greedy_ids_as_on_the_cpu_backend(tiny: LoadedModel) -> None:
    """With chunked prompts, decodes among them, and a prefix hit."""
    shared = prompt(40)
    requests = [EngineRequest("a", shared, greedy(4)), EngineRequest("b", prompt(7, start=3), greedy(4))]
    later = [EngineRequest("c", [*shared, 9, 10], greedy(4))]
    tokens = []
    for attention in ("triton", "torch"):
        engine = make_engine(tiny, attention=attention, max_step_tokens=24)
        tokens.append([run(engine, requests).tokens, run(engine, later).tokens])
        assert peek(engine, [*shared, 9]) == 32
    assert tokens[0] == tokens[1]
