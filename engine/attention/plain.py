"""Attention in plain torch operations, for any device.

Gathering rows of page_size x head_dim is faster than indexing the pool.
The query group is folded into rows, so grouped-query attention copies no keys or values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from components.wire.layout import KvLayout
from engine.attention.backend import Scoring, StepShape
from engine.device.copies import to_device

PADDING_FREE_PAGES: Final = 8  # up to which contexts are padded at any ratio
LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys and values that requests see, padded to S tokens."""

    rows: Tensor  # int64 [2 * N * kv_heads * pages], of layer 0: keys, then values
    bias: Tensor  # [N, query_group * query_len, S]: 0 if seen, else -inf
    unseen: Tensor  # int64, of slots [2 * N * kv_heads * S] that no query sees


@dataclass(frozen=True, slots=True)
class Group:
    """N requests that attend together, `query_len` tokens each."""

    first_token: int
    num_requests: int
    query_len: int
    visible_keys: Callable[[int], VisibleKeys]  # by window, computed on first use


class PlainAttention:
    def __init__(self, pool: Tensor, layout: KvLayout, query_group: int, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of queries, by default the pool's."""
        self._layout = layout
        self._dtype = dtype or pool.dtype
        self._query_group = query_group
        self._pool = pool
        # row of a page at layer 0: page * stride + offsets[kv, head]
        heads = torch.arange(layout.num_heads, device=pool.device) * (layout.layers * 2)
        self._row_offsets = torch.stack([heads, heads + 1])  # [2, kv_heads]
        self._row_stride = layout.num_heads * layout.layers * 2

    def plan(self, shape: StepShape) -> "PlainStep":
        groups = [self._group(shape, first, last, token) for first, last, token in _spans(shape)]
        return PlainStep(self._pool, self._layout, self._slots(shape), groups)

    def _slots(self, shape: StepShape) -> Tensor:
        """Return the new tokens' slots, int64 [2 * kv_heads * T], rows at layer 0."""
        page_size = self._layout.page_size
        pages: list[int] = []
        offsets: list[int] = []
        for query_len, context, table in zip(shape.query_lens, shape.context_lens, shape.block_tables, strict=True):
            positions = range(context - query_len, context)
            pages += [table[position // page_size] for position in positions]
            offsets += [position % page_size for position in positions]
        page_rows = self._tensor(pages) * self._row_stride + self._row_offsets.unsqueeze(-1)  # [2, kv_heads, T]
        return (page_rows * page_size + self._tensor(offsets)).flatten()

    def _group(self, shape: StepShape, first: int, last: int, first_token: int) -> Group:
        query_len = shape.query_lens[first]
        visible = partial(self._visible_keys, shape.context_lens[first:last], query_len, shape.block_tables[first:last])
        return Group(first_token, last - first, query_len, cache(visible))

    def _visible_keys(
        self, contexts: Sequence[int], query_len: int, block_tables: Sequence[Sequence[int]], window: int
    ) -> VisibleKeys:
        page_size = self._layout.page_size
        skipped = [max(context - query_len - window + 1, 0) // page_size if window else 0 for context in contexts]
        pages = max(self._layout.pages_for(context) - skip for context, skip in zip(contexts, skipped, strict=True))
        # padded with its own page, so that a request reads no other's KV
        padded = [_pad(table, skip, pages) for table, skip in zip(block_tables, skipped, strict=True)]
        tables = self._tensor(padded) * self._row_stride  # [N, P]
        rows = tables[None, :, None, :] + self._row_offsets[:, None, :, None]  # [2, N, kv_heads, P]
        first_query = [context - query_len - skip * page_size for context, skip in zip(contexts, skipped, strict=True)]
        length = pages * page_size
        unseen = self._unseen(first_query, query_len, length, window)
        return VisibleKeys(rows.flatten(), self._bias(first_query, query_len, length, window), unseen)

    def _unseen(self, first_query: Sequence[int], query_len: int, padded_len: int, window: int) -> Tensor:
        """Slots before the first query's window, and behind the last query."""
        heads, slots = self._layout.num_heads, list[int]()
        for i, first in enumerate(first_query):
            start = i * heads * padded_len  # of the request's first key head
            if window:
                slots += range(start, start + first - window + 1)
            slots += range(start + first + query_len, start + padded_len)
        each = torch.arange(heads, device=self._pool.device) * padded_len
        both = torch.arange(2, device=self._pool.device) * (len(first_query) * heads * padded_len)  # keys, values
        return (both[:, None, None] + each[:, None] + self._tensor(slots)).flatten()

    def _bias(self, first_query: Sequence[int], query_len: int, padded_len: int, window: int) -> Tensor:
        """Causal mask [N, query_group * query_len, S]; `first_query` holds key indices."""
        queries = (self._tensor(first_query)[:, None] + self._tensor(range(query_len))).unsqueeze(-1)  # [N, T, 1]
        keys = self._tensor(range(padded_len))
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        zero = torch.zeros((), dtype=self._dtype, device=self._pool.device)
        return torch.where(hidden, -torch.inf, zero).repeat(1, self._query_group, 1)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(values, self._pool.device, torch.int64)


class PlainStep:
    def __init__(self, pool: Tensor, layout: KvLayout, slots: Tensor, groups: list[Group]) -> None:
        self._layout = layout
        self._slots = slots
        self._groups = groups
        self._page_dtype = pool.dtype
        # torch cannot index 8-bit floats
        stored = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
        self._by_token = stored.view(-1, layout.head_dim)
        self._by_page = stored.view(-1, layout.page_size * layout.head_dim)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        new = torch.stack([key, value]).view(-1, self._layout.head_dim)  # [2 * kv_heads * T, head_dim]
        if self._page_dtype == torch.float8_e4m3fn:
            new = new.clamp(-LARGEST, LARGEST).to(self._page_dtype).view(torch.uint8)
        self._by_token.index_copy_(0, self._slots + layer * 2 * self._layout.page_size, new)
        outputs = [self._attend_group(group, layer, query, scoring, sinks) for group in self._groups]
        return torch.cat(outputs, dim=1)

    def _attend_group(self, group: Group, layer: int, query: Tensor, scoring: Scoring, sinks: Tensor | None) -> Tensor:
        kv_heads, head_dim = self._layout.num_heads, self._layout.head_dim
        num, length = group.num_requests, group.query_len
        visible = group.visible_keys(scoring.window)
        gathered = self._by_page.index_select(0, visible.rows + layer * 2)
        # Another request may have left NaN in slots that are not written yet, and 0 x NaN is NaN.
        gathered.view(-1, head_dim).index_fill_(0, visible.unseen, 0)
        gathered = gathered.view(self._page_dtype).to(query.dtype)
        keys, values = gathered.view(2, num, kv_heads, -1, head_dim)  # [N, kv_heads, S, head_dim] each
        mine = query[0, :, group.first_token : group.first_token + num * length]
        folded = mine.view(kv_heads, -1, num, length, head_dim).permute(2, 0, 1, 3, 4)  # [N, kv_heads, group, T, D]
        folded = folded.reshape(num, kv_heads, -1, head_dim)
        bias = visible.bias.unsqueeze(1)
        if length == 1 or scoring.softcap or sinks is not None:
            out = _attend_rows(folded, keys, values, bias, scoring, sinks=sinks)
        else:
            out = scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scoring.scaling)
        out = out.view(num, kv_heads, -1, length, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(1, num * length, -1, head_dim)


def _attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scoring: Scoring,
    *,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in two matmuls, which are faster for few rows than a fused kernel.

    Args:
        query: [N, H, R, D]; R rows are the query heads of a key head, for each its tokens.
        keys: [N, H, S, D].
    Returns: [N, H, R, D].
    """
    num, heads, rows, dim = query.shape
    spread = bias.expand(num, heads, rows, -1).reshape(num * heads, rows, -1)
    query, keys = query.reshape(-1, rows, dim), keys.flatten(0, 1).transpose(1, 2)
    if scoring.softcap:
        scores = torch.bmm(query, keys).mul_(scoring.scaling / scoring.softcap).tanh_()
        scores = scores.mul_(scoring.softcap).add_(spread)
    else:
        scores = torch.baddbmm(spread, query, keys, alpha=scoring.scaling)
    if sinks is not None:
        each = sinks.to(scores.dtype).view(1, heads, -1, 1).expand(num, -1, -1, rows * heads // len(sinks))
        scores = torch.cat([scores, each.reshape(-1, rows, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return torch.bmm(weights, values.flatten(0, 1)).view(num, heads, rows, dim)


def _spans(shape: StepShape) -> Iterator[tuple[int, int, int]]:
    """Yield (first request, request after the last, first token) of each group.

    Decodes share a group while padding at most doubles the short ones. A prompt chunk has its own.
    """
    tokens = [0, *accumulate(shape.query_lens)]
    first = 0
    for i in range(1, len(shape.query_lens) + 1):
        if i < len(shape.query_lens) and shape.query_lens[i] == 1:
            pages = len(shape.block_tables[i])
            if pages <= max(PADDING_FREE_PAGES, 2 * len(shape.block_tables[first])):
                continue
        yield first, i, tokens[first]
        first = i


def _pad(table: Sequence[int], skip: int, num_pages: int) -> list[int]:
    kept = table[skip : skip + num_pages]
    return [*kept, *[table[skip]] * (num_pages - len(kept))]
