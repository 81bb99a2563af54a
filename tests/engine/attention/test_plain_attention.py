"""The backend, compared with attention written out, with pages in any order."""

import pytest
import torch

from bench.attention_case import AttentionCase, Outcome
from components.wire.layout import KvLayout
from engine.attention.backend import Scoring, StepShape
from engine.attention.plain import PlainAttention, _spans
from tests.engine.attention.makers import make_plain

KV_HEADS, LAYERS, PAGE, DIM = 2, 3, 16, 8
PLAIN = Scoring(0.3)


def layout(dtype: str, page_size: int = PAGE) -> KvLayout:
    return KvLayout(model="m", dtype=dtype, page_size=page_size, layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM)


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return [T, heads, D] of the last T queries [heads, T, D] over keys and values [kv_heads, S, D], in fp32."""
    keys, values = (x.float().repeat_interleave(len(query) // KV_HEADS, dim=0) for x in (keys, values))
    scores = query.float() @ keys.transpose(1, 2) * scoring.scaling
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    length, context = scores.shape[1:]
    back = torch.arange(context - length, context)[:, None] - torch.arange(context)  # how far a key lies behind
    seen = (back >= 0) & (back < (scoring.window or context))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [1]),
        ([1], [16]),
        ([1, 1, 1], [1, 17, 40]),
        ([1, 1, 1], [3, 5, 400]),  # too far apart to pad
        ([7], [7]),
        ([16], [48]),
        ([1, 1, 20, 5], [4, 33, 20, 70]),
    ],
)
def test_each_request_attends_to_its_own_context(
    dtype: str, tolerance: float, query_lens: list[int], context_lens: list[int]
) -> None:
    check(query_lens, context_lens, PLAIN, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("window", [1, 5, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([1], [40]), ([1, 1, 1, 1], [1, 17, 40, 97]), ([20], [97]), ([33], [33]), ([1, 1, 20, 5], [4, 50, 20, 70])],
)
def test_a_query_sees_no_further_back_than_its_window(
    query_lens: list[int], context_lens: list[int], window: int, softcap: float
) -> None:
    check(query_lens, context_lens, Scoring(0.3, window, softcap))


@pytest.mark.parametrize("scoring", [PLAIN, Scoring(0.3, 17, 0.5)], ids=["plain", "windowed and capped"])
@pytest.mark.parametrize("lengths", [((1, 1, 1), (1, 17, 400)), ((1, 1, 20, 5), (4, 33, 20, 70))], ids=str)
def test_sinks_join_the_softmax_without_a_value(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], scoring: Scoring
) -> None:
    case = AttentionCase(*lengths, scoring, sinks=True)
    Outcome(case, make_plain).check()


def test_an_output_that_is_not_finite_is_wrong() -> None:
    outcome = Outcome(AttentionCase((1, 1, 20), (4, 33, 20)), make_plain)
    outcome.check()
    outcome.out[0, 5] = torch.nan
    with pytest.raises(AssertionError, match="off by nan"):
        outcome.check()


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_windows_hold_for_every_page_size_and_kind_of_heads(page_size: int, group: int) -> None:
    for window in (0, 33, 64, 200):
        check([1, 1, 30], [10, 200, 300], Scoring(0.3, window, 1.0), page_size=page_size, group=group)


def test_layers_of_one_step_may_have_different_windows() -> None:
    """A window of a step must not use the tables of an earlier one."""
    pool, attention, tables = made([1, 6], [50, 90], page_size=PAGE, group=1, dtype="float32")
    step = attention.plan(StepShape([1, 6], [50, 90], tables))
    query, key, value = torch.randn(3, 1, KV_HEADS, 7, DIM)
    for layer, window in ((0, 20), (1, 0), (2, 20)):
        out = step.attend(layer, query, key, value, Scoring(0.3, window))
        alone = attention.plan(StepShape([1, 6], [50, 90], tables))
        assert torch.equal(out, alone.attend(layer, query, key, value, Scoring(0.3, window)))
    assert pool.isfinite().all()


def test_pages_behind_the_window_are_not_read() -> None:
    pool, attention, (table,) = made([1], [100], page_size=PAGE, group=1, dtype="float32")
    step = attention.plan(StepShape([1], [100], [table]))
    pool[table[:5]] = torch.nan  # the last query, at 99, sees from 80 on, where page 5 begins
    query, key, value = torch.randn(3, 1, KV_HEADS, 1, DIM)
    assert step.attend(0, query, key, value, Scoring(0.3, 20)).isfinite().all()
    assert step.attend(0, query, key, value, Scoring(0.3, 21)).isnan().all()


def made(
    query_lens: list[int], context_lens: list[int], *, page_size: int, group: int, dtype: str
) -> tuple[torch.Tensor, PlainAttention, list[list[int]]]:
    """A pool of random pages, attention over it, and block tables in any order."""
    torch.manual_seed(0)
    pages_each = [-(-context // page_size) for context in context_lens]
    shuffled = iter(torch.randperm(sum(pages_each) + 3).tolist())
    tables = [[next(shuffled) for _ in range(count)] for count in pages_each]
    pool = torch.randn(sum(pages_each) + 3, KV_HEADS, LAYERS, 2, page_size, DIM).to(getattr(torch, dtype))
    return pool, PlainAttention(pool, layout(dtype, page_size), group), tables


def check(
    query_lens: list[int],
    context_lens: list[int],
    scoring: Scoring,
    *,
    dtype: str = "float32",
    tolerance: float = 1e-5,
    page_size: int = PAGE,
    group: int = 3,
) -> None:
    """Compare a layer of a step with attention written out; other layers and slots must not change."""
    pool, attention, tables = made(query_lens, context_lens, page_size=page_size, group=group, dtype=dtype)
    before, torch_dtype = pool.clone(), pool.dtype
    total = sum(query_lens)
    query = torch.randn(1, KV_HEADS * group, total, DIM).to(torch_dtype)
    key, value = torch.randn(2, 1, KV_HEADS, total, DIM).to(torch_dtype)
    step = attention.plan(StepShape(query_lens, context_lens, tables))
    layer = 1
    out = step.attend(layer, query, key, value, scoring)
    first = 0
    for length, context, table in zip(query_lens, context_lens, tables, strict=True):
        new = slice(first, first + length)
        stood = before[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)  # [2, kv_heads, S, D]
        keys, values = stood[:, :, : context - length]
        keys, values = torch.cat([keys, key[0, :, new]], 1), torch.cat([values, value[0, :, new]], 1)
        assert (out[0, new].float() - expected(query[0, :, new], keys, values, scoring)).abs().max() < tolerance
        written = pool[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)
        assert torch.equal(written[:, :, :context], torch.stack([keys, values]))
        assert torch.equal(written[:, :, context:], stood[:, :, context:])
        first += length
    assert torch.equal(pool[:, :, [0, 2]], before[:, :, [0, 2]]), "another layer was written"


def test_decodes_of_like_length_attend_together_and_others_apart() -> None:
    tables = [[0] * pages for pages in (1, 2, 8, 9, 15, 40, 3, 4)]
    shape = StepShape([1, 1, 1, 1, 1, 1, 20, 9], [16 * len(table) for table in tables], tables)
    assert list(_spans(shape)) == [(0, 3, 0), (3, 5, 3), (5, 6, 5), (6, 7, 6), (7, 8, 26)]


@pytest.mark.parametrize("left", [1e6, torch.nan, torch.inf])
@pytest.mark.parametrize("scoring", [Scoring(1.0), Scoring(1.0, softcap=5.0)])
def test_what_another_request_left_behind_the_end_of_a_page_has_no_weight(left: float, scoring: Scoring) -> None:
    """After a request with NaN in its KV, all later owners of its pages failed."""
    pool = torch.zeros(2, KV_HEADS, LAYERS, 2, PAGE, DIM)
    pool[:, :, :, :, 1:] = left
    attention = PlainAttention(pool, layout("float32"), 3)
    new = torch.ones(1, KV_HEADS, 1, DIM)
    out = attention.plan(StepShape([1], [1], [[1]])).attend(0, torch.ones(1, 6, 1, DIM), new, new, scoring)
    assert torch.equal(out, torch.ones(1, 1, 6, DIM))


def test_a_prompt_and_padded_decodes_see_nothing_behind_their_end() -> None:
    lengths, contexts = [1, 1, 20], [5, 60, 20]
    pool, attention, tables = made(lengths, contexts, page_size=PAGE, group=3, dtype="float32")
    query = torch.randn(1, KV_HEADS * 3, 22, DIM)
    key, value = torch.randn(2, 1, KV_HEADS, 22, DIM)
    outputs = []
    for left in (0.0, torch.nan):
        for table, context in zip(tables, contexts, strict=True):
            pool[table[-1], :, :, :, context % PAGE :] = left
        step = attention.plan(StepShape(lengths, contexts, tables))
        outputs.append(step.attend(1, query, key, value, Scoring(1.0)))
    assert torch.equal(*outputs)
