"""The backend against attention written out, with pages in any order and other layers untouched."""

import pytest
import torch

from components.kv_transfer.layout import KvLayout
from engine.attention.backend import Scoring, StepShape
from engine.attention.cpu import CpuAttention, _spans

KV_HEADS, GROUP, LAYERS, PAGE, DIM = 2, 3, 3, 16, 8


def layout(dtype: str) -> KvLayout:
    return KvLayout(model="m", dtype=dtype, page_size=PAGE, layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM)


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] of T last queries [heads, T, D] over keys and values [kv_heads, S, D], in fp32."""
    keys, values = (x.float().repeat_interleave(GROUP, dim=0) for x in (keys, values))
    scores = query.float() @ keys.transpose(1, 2) * 0.3
    length, context = scores.shape[1:]
    hidden = torch.ones(length, context, dtype=torch.bool).triu(context - length + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


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
    torch.manual_seed(0)
    torch_dtype = getattr(torch, dtype)
    pages_each = [-(-context // PAGE) for context in context_lens]
    shuffled = iter(torch.randperm(sum(pages_each) + 3).tolist())
    tables = [[next(shuffled) for _ in range(count)] for count in pages_each]
    pool = torch.randn(sum(pages_each) + 3, KV_HEADS, LAYERS, 2, PAGE, DIM).to(torch_dtype)
    before = pool.clone()
    attention = CpuAttention(pool, layout(dtype), GROUP)
    total = sum(query_lens)
    query = torch.randn(1, KV_HEADS * GROUP, total, DIM).to(torch_dtype)
    key, value = torch.randn(2, 1, KV_HEADS, total, DIM).to(torch_dtype)
    step = attention.plan(StepShape(query_lens, context_lens, tables))
    layer = 1
    out = step.attend(layer, query, key, value, Scoring(0.3))
    first = 0
    for length, context, table in zip(query_lens, context_lens, tables, strict=True):
        new = slice(first, first + length)
        stood = before[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)  # [2, kv_heads, pages * PAGE, D]
        keys, values = stood[:, :, : context - length]
        keys, values = torch.cat([keys, key[0, :, new]], 1), torch.cat([values, value[0, :, new]], 1)
        assert (out[0, new].float() - expected(query[0, :, new], keys, values)).abs().max() < tolerance
        written = pool[table, :, layer].permute(2, 1, 0, 3, 4).flatten(2, 3)
        assert torch.equal(written[:, :, :context], torch.stack([keys, values]))
        assert torch.equal(written[:, :, context:], stood[:, :, context:])
        first += length
    assert torch.equal(pool[:, :, [0, 2]], before[:, :, [0, 2]]), "another layer was written"


def test_decodes_of_like_length_attend_together_and_others_apart() -> None:
    tables = [[0] * pages for pages in (1, 2, 8, 9, 15, 40, 3, 4)]
    shape = StepShape([1, 1, 1, 1, 1, 1, 20, 9], [16 * len(table) for table in tables], tables)
    assert list(_spans(shape)) == [(0, 3, 0), (3, 5, 3), (5, 6, 5), (6, 7, 6), (7, 8, 26)]


def test_what_another_request_left_behind_the_end_of_a_page_has_no_weight() -> None:
    pool = torch.zeros(2, KV_HEADS, LAYERS, 2, PAGE, DIM)
    pool[:, :, :, :, 1:] = 1e6
    attention = CpuAttention(pool, layout("float32"), GROUP)
    new = torch.ones(1, KV_HEADS, 1, DIM)
    out = attention.plan(StepShape([1], [1], [[1]])).attend(0, torch.ones(1, 6, 1, DIM), new, new, Scoring(1.0))
    assert torch.equal(out, torch.ones(1, 1, 6, DIM))
