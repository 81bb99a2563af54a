"""What kernels find on the device, and what of it is made anew."""

import pytest
import torch

from engine.attention.backend import StepShape
from engine.attention.step_tables import PageRows, PromptBlocks, StepLimits, StepTables, count_decodes

PAGE = 16


def filled(shape: StepShape, requests: int = 6) -> tuple[StepTables, PromptBlocks]:
    tables = StepTables(StepLimits(requests, 200, 160), PAGE, torch.device("cpu"))
    return tables, tables.fill(shape, count_decodes(shape.query_lens), 16)


def test_tables_hold_each_request_s_pages_as_far_as_its_context_goes() -> None:
    tables, _ = filled(StepShape([1, 1, 20], [3, 17, 40], [[5, 6], [1, 2, 3], [9, 8, 7]]))
    assert tables.context_lens.tolist() == [3, 17, 40, 0, 0, 0, 0, 0]
    assert tables.table_starts[:3].tolist() == [0, 1, 3]
    assert tables.pages[:6].tolist() == [5, 1, 2, 9, 8, 7]


def test_rows_of_the_step_before_are_padding_in_the_next() -> None:
    tables, _ = filled(StepShape([1, 1], [3, 17], [[5], [1, 2]]))
    tables.fill(StepShape([1], [4], [[5]]), 1, 16)
    assert tables.context_lens.tolist() == [4, 0, 0, 0, 0, 0, 0, 0]
    tables.fill(StepShape([], [], []), 0, 16)
    assert not tables.context_lens.any()


def test_blocks_cover_every_query_once_those_that_see_most_first() -> None:
    _, blocks = filled(StepShape([1, 20, 33], [9, 20, 100], [[0], [1, 2], list(range(3, 10))]))
    assert blocks.query_starts.tolist() == [1, 21, 54]
    assert list(zip(blocks.requests.tolist(), blocks.firsts.tolist(), strict=True)) == [
        (1, 32),
        (1, 16),
        (1, 0),
        (0, 16),
        (0, 0),
    ]
    assert (blocks.count, blocks.block_m) == (5, 16)


def test_the_largest_step_fits() -> None:
    lengths = [2] * 6
    _, blocks = filled(StepShape(lengths, [160] * 6, [list(range(10))] * 6))
    assert blocks.count == 6


def test_more_requests_than_the_tables_were_made_for_are_an_error() -> None:
    with pytest.raises(AssertionError, match="more requests"):
        filled(StepShape([1] * 3, [1] * 3, [[0]] * 3), requests=2)


def test_a_table_that_changed_in_place_is_converted_again_and_another_is_not() -> None:
    rows = PageRows(PAGE)
    tables = [[1, 2], [3, 4]]
    first = rows.take(StepShape([1, 1], [20, 20], tables))
    tables[1][0] = 7  # another request's prefix took its place
    second = rows.take(StepShape([1, 1], [21, 21], tables))
    assert [row.tolist() for row in second] == [[1, 2], [7, 4]]
    assert second[0] is first[0]
