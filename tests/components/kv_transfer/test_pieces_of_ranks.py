"""Pieces between instances of several ranks: each byte of each copy of a page is written once, correctly."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from components.errors import IncompatibleLayout
from components.kv_transfer.pieces import cut
from components.wire.layout import KvLayout, can_shard, check_compatible, largest_shard, of_shard

WHOLE = KvLayout(model="m", dtype="float16", page_size=16, layers=2, kv_heads=4, head_dim=4)
PAGES = 20
Bytes = npt.NDArray[np.uint8]


def numbers(layout: KvLayout, pages: Sequence[int], num_tokens: int) -> Bytes:
    """Make a pool with a number for each (head, layer, key or value, token, byte), and 0 elsewhere."""
    pool = np.zeros((PAGES, layout.num_heads, layout.layers, 2, layout.page_size, layout.row_bytes), dtype=np.uint8)
    axes = np.ix_(layout.heads, range(layout.layers), range(2), range(layout.row_bytes))
    for token in range(num_tokens):
        place = pool[pages[token // layout.page_size], ..., token % layout.page_size, :]
        place[...] = 1 + (axes[0] * 59 + axes[1] * 31 + axes[2] * 17 + axes[3] * 7 + token * 13) % 255
    return pool.reshape(-1)


@given(
    kv_heads=st.sampled_from((1, 2, 3, 4, 5, 6, 8)),
    ranks=st.tuples(*(st.sampled_from((1, 2, 3, 4, 5, 6, 8)) for _ in range(2))),
    sizes=st.sampled_from(list(product((16, 32, 64), repeat=2))),
    num_tokens=st.integers(1, 130),
    first=st.integers(0, 129),
    draw=st.randoms(use_true_random=False),
)
def test_each_byte_is_written_once_and_right(
    kv_heads: int, ranks: tuple[int, int], sizes: tuple[int, int], num_tokens: int, first: int, draw: object
) -> None:
    if not all(can_shard(kv_heads, size) for size in ranks):
        return
    unit = min(sizes)
    tokens = range(min(first, num_tokens - 1) // unit * unit, num_tokens)
    sides = [
        [replace(of_shard(replace(WHOLE, kv_heads=kv_heads), i, n), page_size=size) for i in range(n)]
        for n, size in zip(ranks, sizes, strict=True)
    ]
    tables = [draw.sample(range(PAGES), side[0].pages_for(num_tokens)) for side in sides]  # type: ignore[attr-defined]
    sources = [numbers(layout, tables[0], num_tokens) for layout in sides[0]]
    for theirs in sides[1]:
        check_compatible(sides[0][0], theirs)
        target = np.zeros(PAGES * theirs.page_bytes, dtype=np.uint8)
        times = np.zeros(len(target), dtype=np.int64)
        for ours, source in zip(sides[0], sources, strict=True):
            pieces = cut(ours, theirs, tokens, *tables)
            for start, end, length in zip(pieces.source, pieces.target, pieces.length, strict=True):
                target[end : end + length] = source[start : start + length]
                times[end : end + length] += 1
        wanted = numbers(theirs, tables[1], num_tokens)
        wanted[numbers(theirs, tables[1], tokens.start) > 0] = 0
        np.testing.assert_array_equal(target, wanted)
        np.testing.assert_array_equal(times, wanted > 0)


@pytest.mark.parametrize(("prefill", "decode", "pieces"), [(1, 1, 1), (1, 4, 4), (4, 1, 4), (2, 4, 4), (8, 2, 4)])
def test_a_page_is_one_piece_for_each_pair_of_ranks(prefill: int, decode: int, pieces: int) -> None:
    """With this number of heads; pages are head-major."""
    pairs = product(range(prefill), range(decode))
    layouts = [(of_shard(WHOLE, i, prefill), of_shard(WHOLE, k, decode)) for i, k in pairs]
    assert sum(len(cut(ours, theirs, range(16), [3], [5])) for ours, theirs in layouts) == pieces


@pytest.mark.parametrize(("kv_heads", "ranks"), [(3, 2), (5, 3), (8, 3), (8, 5)])
def test_heads_that_the_ranks_do_not_divide_are_as_equal_as_they_can_be(kv_heads: int, ranks: int) -> None:
    layouts = [of_shard(replace(WHOLE, kv_heads=kv_heads), rank, ranks) for rank in range(ranks)]
    assert [head for layout in layouts for head in layout.heads] == list(range(kv_heads))
    numbers = [layout.num_heads for layout in layouts]
    assert max(numbers) - min(numbers) == 1
    assert (numbers[0], largest_shard(layouts[0]).num_heads) == (min(numbers), max(numbers))


def test_layouts_that_cannot_exchange_pages_name_both_values() -> None:
    check_compatible(of_shard(WHOLE, 1, 2), of_shard(WHOLE, 3, 4))
    check_compatible(WHOLE, of_shard(WHOLE, 0, 8))
    check_compatible(of_shard(WHOLE, 0, 3), of_shard(WHOLE, 1, 2))
    with pytest.raises(IncompatibleLayout, match="shards: 2 here, 6 there"):
        check_compatible(of_shard(WHOLE, 0, 2), of_shard(WHOLE, 0, 6))
    with pytest.raises(IncompatibleLayout, match="version: 2 here, 3 there"):
        check_compatible(of_shard(WHOLE, 0, 2), replace(WHOLE, version=3))
    with pytest.raises(IncompatibleLayout, match="kv_heads: 4 here, 8 there"):
        check_compatible(of_shard(WHOLE, 0, 2), of_shard(replace(WHOLE, kv_heads=8), 0, 4))
    with pytest.raises(IncompatibleLayout, match="kv_heads: 4 here, 0 there"):  # a wrong record
        check_compatible(WHOLE, replace(WHOLE, kv_heads=0))
