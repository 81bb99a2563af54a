"""Pieces against numpy's own indexing of the same two pools."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from components.errors import IncompatibleLayout
from components.kv_transfer.pieces import Pieces, cut
from components.wire.layout import KvLayout, check_compatible
from tests.components.kv_transfer.pools import LAYOUT, NUM_TOKENS, block_table, brute_force, copied, pool

PAGE_SIZES = (16, 32, 64, 128)
PAIRS = list(product(PAGE_SIZES, PAGE_SIZES))
DEFAULT = KvLayout(model="m", dtype="bfloat16", page_size=16, layers=30, kv_heads=3, head_dim=64)


def check(ours: KvLayout, theirs: KvLayout, tokens: range, seed: int = 0) -> Pieces:
    source, target = pool(ours, seed + 1), pool(theirs, seed + 2)
    from_pages, to_pages = block_table(ours, seed + 3), block_table(theirs, seed + 4)
    pieces = cut(ours, theirs, tokens, from_pages, to_pages)
    assert int(pieces.length.sum()) == len(tokens) * ours.num_stripes * ours.row_bytes, "each byte once"
    np.testing.assert_array_equal(
        copied(pieces, source, target), brute_force(tokens, source, from_pages, target, to_pages)
    )
    return pieces


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(
    "tokens",
    [range(300), range(1), range(128), range(16, 128), range(15, 17), range(127, 300), range(299, 300), range(33, 34)],
    ids=str,
)
def test_every_row_of_the_range_arrives_and_no_other_changes(ours: int, theirs: int, tokens: range) -> None:
    check(replace(LAYOUT, page_size=ours), replace(LAYOUT, page_size=theirs), tokens)


@given(
    sizes=st.sampled_from(PAIRS),
    cuts=st.lists(st.integers(0, NUM_TOKENS), min_size=2, max_size=5, unique=True).map(sorted),
    seed=st.integers(0, 2**16),
    heads=st.integers(1, 3),
    layers=st.integers(1, 2),
)
def test_any_chunks_of_any_prompt_give_what_one_write_gives(
    sizes: tuple[int, int], cuts: list[int], seed: int, heads: int, layers: int
) -> None:
    ours, theirs = (replace(LAYOUT, page_size=size, kv_heads=heads, layers=layers) for size in sizes)
    source, target = pool(ours, seed), pool(theirs, seed + 1)
    from_pages, to_pages = block_table(ours, seed + 2), block_table(theirs, seed + 3)
    expected = brute_force(range(cuts[0], cuts[-1]), source, from_pages, target, to_pages)
    for start, stop in pairwise(cuts):
        target = copied(cut(ours, theirs, range(start, stop), from_pages, to_pages), source, target)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (128, 16), (64, 128)])
def test_a_piece_is_a_stripe_of_a_page_of_the_smaller_size(ours: int, theirs: int) -> None:
    small, end = min(ours, theirs), 2 * max(ours, theirs)
    pieces = check(replace(LAYOUT, page_size=ours), replace(LAYOUT, page_size=theirs), range(end))
    assert len(pieces) == end // small * LAYOUT.num_stripes
    assert set(pieces.length.tolist()) == {small * LAYOUT.row_bytes}


def test_180_pieces_a_page_of_the_default_model() -> None:
    pieces = cut(DEFAULT, replace(DEFAULT, page_size=64), range(64), [3, 1, 2, 0], [5])
    assert (DEFAULT.num_stripes, len(pieces)) == (180, 4 * 180)
    assert int(pieces.length.sum()) == 4 * DEFAULT.page_bytes


@pytest.mark.parametrize("size", PAGE_SIZES)
def test_pages_of_one_size_that_follow_each_other_on_both_sides_are_one_piece(size: int) -> None:
    layout = replace(LAYOUT, page_size=size)
    [length] = cut(layout, layout, range(3 * size), [4, 5, 6], [0, 1, 2]).length
    assert length == 3 * layout.page_bytes
    assert len(cut(layout, layout, range(3 * size), [4, 5, 6], [0, 1, 3])) == 2
    assert len(cut(layout, layout, range(3 * size), [4, 6, 5], [0, 1, 2])) == 3


@pytest.mark.parametrize("sizes", PAIRS)
def test_page_sizes_that_divide_are_compatible(sizes: tuple[int, int]) -> None:
    ours, theirs = (replace(LAYOUT, page_size=size) for size in sizes)
    check_compatible(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), [(32, 48), (48, 32), (16, 0), (-16, 16)])
def test_page_sizes_that_do_not_divide_are_refused_with_both_named(ours: int, theirs: int) -> None:
    with pytest.raises(IncompatibleLayout, match=rf"\(page_size: {ours} here, {theirs} there\)"):
        check_compatible(replace(LAYOUT, page_size=ours), replace(LAYOUT, page_size=theirs))


def test_a_fitting_page_size_excuses_no_other_difference_and_is_not_named() -> None:
    other = replace(LAYOUT, page_size=64, dtype="float16", kv_heads=1)
    with pytest.raises(IncompatibleLayout, match=r"\(dtype: bfloat16 here, float16 there, kv_heads: 2 here, 1 there\)"):
        check_compatible(LAYOUT, other)
