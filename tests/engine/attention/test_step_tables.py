"""The tables of a step on the device: their contents, their reuse, and the division of work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import StepShape
from engine.attention.step_tables import Blocks, Filled, PageRows, StepLimits, StepTables, count_decodes

PAGE = 16
SPAN = 32
BLOCKS = Blocks([4, 16], SPAN)


def filled(shape: StepShape, requests: int = 6, blocks: Blocks = BLOCKS) -> tuple[StepTables, Filled]:
    tables = StepTables(StepLimits(requests, 200, 160), PAGE, torch.device("cpu"), blocks)
    return tables, tables.fill(shape, count_decodes(shape.query_lens))


def decode_work(tables: StepTables) -> list[tuple[int, int]]:
    """Return (row, span), like a kernel."""
    count, offset = tables.header[:2].tolist()
    rows, spans = tables.pages[offset:][: 2 * count].view(2, -1).tolist()
    return list(zip(rows, spans, strict=True))


def test_tables_hold_each_request_s_pages_as_far_as_its_context_goes() -> None:
    tables, _ = filled(StepShape([1, 1, 20], [3, 17, 40], [[5, 6], [1, 2, 3], [9, 8, 7]]))
    assert tables.context_lens.tolist() == [3, 17, 40, 0, 0, 0, 0, 0]
    assert tables.table_starts[:3].tolist() == [0, 1, 3]
    assert tables.pages[:6].tolist() == [5, 1, 2, 9, 8, 7]


def test_rows_of_the_step_before_are_padding_in_the_next_and_have_no_work() -> None:
    tables, _ = filled(StepShape([1, 1], [3, 17], [[5], [1, 2]]))
    assert decode_work(tables) == [(1, 0), (0, 0)]
    tables.fill(StepShape([1], [4], [[5]]), 1)
    assert tables.context_lens.tolist() == [4, 0, 0, 0, 0, 0, 0, 0]
    assert decode_work(tables) == [(0, 0)]
    tables.fill(StepShape([], [], []), 0)
    assert not tables.context_lens.any()
    assert decode_work(tables) == []


def test_a_decode_has_a_piece_of_work_for_each_span_the_longest_first() -> None:
    contexts = [31, 32, 33, 100]
    tables, work = filled(StepShape([1] * 4, contexts, [list(range(7))] * 4))
    assert decode_work(tables) == [(2, 0), (3, 0), (3, 1), (3, 2), (1, 0), (0, 0), (3, 3), (2, 1)]
    assert tables.slots[:4].tolist() == [0, 1, 2, 4]
    assert work.pieces == 8
    tables.fill(StepShape([1] * 4, [32, 33, 34, 101], [list(range(7))] * 4), 4)
    assert decode_work(tables)[:5] == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)], "row 1 has another span now"
    assert tables.slots[:4].tolist() == [0, 1, 3, 5]


def test_blocks_cover_every_query_of_a_chunk_whose_size_does_not_depend_on_others() -> None:
    _, work = filled(StepShape([1, 4, 20, 33], [9, 4, 20, 100], [[0], [1], [1, 2], list(range(3, 10))]))
    assert work.query_starts.tolist() == [1, 5, 25, 58]
    short, long = work.prompts
    assert (short.size, short.requests.tolist(), short.firsts.tolist()) == (0, [0], [0])
    assert long.size == 1
    assert sorted(zip(long.requests.tolist(), long.firsts.tolist(), strict=True)) == [
        *((1, 0), (1, 16)),
        *((2, 0), (2, 16), (2, 32)),
    ]


def test_a_chunk_over_a_long_prefix_is_cut_into_spans_by_its_blocks_and_the_longest_come_first() -> None:
    _, work = filled(StepShape([4, 33, 2], [100, 160, 31], [list(range(7)), list(range(10)), [0, 1]]))
    short, long = work.prompts
    # three blocks: spans of 3 * 32 keys
    assert (long.split, long.counts.tolist(), long.slots.tolist(), long.partials) == (3, [2, 2, 2], [0, 2, 4], 6)
    pieces = list(zip(long.piece_blocks.tolist(), long.piece_spans.tolist(), strict=True))
    assert pieces == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    # one block each; that with a single span comes last
    assert (short.requests.tolist(), short.counts.tolist(), short.split, short.partials) == ([0, 2], [4, 1], 1, 4)


def test_partial_results_that_do_not_fit_are_made_in_several_launches() -> None:
    shape = StepShape([4] * 5, [160, 10, 160, 160, 150], [list(range(10))] * 5)
    _, work = filled(shape, blocks=Blocks([4, 16], SPAN, most_partials=10))
    assert [launch.requests.tolist() for launch in work.prompts] == [[0, 2, 1], [3, 4]]
    assert [launch.slots[: launch.split].tolist() for launch in work.prompts] == [[0, 5], [0, 5]]
    assert [launch.partials for launch in work.prompts] == [10, 10]


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 160), max_size=4).map(sorted),
    chunks=st.lists(st.tuples(st.integers(2, 90), st.integers(0, 70)), max_size=2),
    blocks=st.sampled_from([BLOCKS, Blocks([1], SPAN), Blocks([4, 16], SPAN, 3), Blocks([5, 21], 16, 7)]),
)
def test_every_query_meets_every_key_before_it_once(
    decodes: list[int], chunks: list[tuple[int, int]], blocks: Blocks
) -> None:
    contexts = [*decodes, *(length + cached for length, cached in chunks)]
    lens = [*(1 for _ in decodes), *(length for length, _ in chunks)]
    tables, work = filled(StepShape(lens, contexts, [list(range(10))] * len(lens)), blocks=blocks)
    assert sorted(decode_work(tables)) == [(r, s) for r, c in enumerate(decodes) for s in range(-(-c // blocks.span))]
    met: list[tuple[int, int, int, int]] = []  # chunk, block's first query, first key, key behind the last
    for launch in work.prompts:
        tokens = blocks.tokens[launch.size]
        for block, span in zip(launch.piece_blocks.tolist(), launch.piece_spans.tolist(), strict=True):
            chunk, first = int(launch.requests[block]), int(launch.firsts[block])
            length, cached = chunks[chunk]
            width = blocks.span * -(-length // tokens)
            end = cached + min(first + tokens, length)
            met.append((chunk, first, span * width, min((span + 1) * width, end)))
            assert span * width < end
            assert (block < launch.split) == (int(launch.counts[block]) > 1)
    for chunk, (length, cached) in enumerate(chunks):
        tokens = blocks.tokens[int(blocks.of_chunks(torch.tensor([length]).numpy())[0])]
        for first in range(0, length, tokens):
            pieces = sorted((begin, end) for c, f, begin, end in met if (c, f) == (chunk, first))
            assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == cached + min(first + tokens, length)


@pytest.mark.parametrize("lens", [[1] * 6, [2] * 6, [2, 2, 2, 2, 96, 96], [1, 1, 1, 1, 1, 195]], ids=str)
@pytest.mark.parametrize("blocks", [BLOCKS, Blocks([1], SPAN), Blocks([4, 16], 16, 1)], ids=str)
def test_the_largest_step_fits(lens: list[int], blocks: Blocks) -> None:
    contexts = [max(160, length) for length in lens]
    tables = StepTables(StepLimits(6, 200, 200), PAGE, torch.device("cpu"), blocks)
    work = tables.fill(StepShape(lens, contexts, [list(range(13))] * 6), count_decodes(lens))
    assert all(len(launch.piece_blocks) == int(launch.counts.sum()) for launch in work.prompts)


def test_more_requests_than_the_tables_were_made_for_are_an_error() -> None:
    with pytest.raises(AssertionError, match="more requests"):
        filled(StepShape([1] * 3, [1] * 3, [[0]] * 3), requests=2)


def test_a_table_that_changed_in_place_is_converted_again_and_another_is_not() -> None:
    rows = PageRows(PAGE)
    tables = [[1, 2], [3, 4]]
    first = rows.take(StepShape([1, 1], [20, 20], tables))
    tables[1][0] = 7  # another request's page
    second = rows.take(StepShape([1, 1], [21, 21], tables))
    assert [row.tolist() for row in second] == [[1, 2], [7, 4]]
    assert second[0] is first[0]
