"""Pages in a tensor, for tests on a GPU, equal those in plain memory."""

import numpy as np
import pytest
from msgspec.structs import replace

from components.kv_transfer.nixl_transfer import open_nixl
from tests.components.kv_transfer.nixl_peer import LATER_MS, LAYOUT, NUM_PAGES, Pages, of_size
from tests.components.kv_transfer.tensor_pages import TensorPages


def test_they_have_the_same_content() -> None:
    layout = replace(LAYOUT, page_size=64)
    mine, plain = TensorPages(layout, 16), of_size(64)
    for pages in (mine, plain):
        pages.fill(9)
    np.testing.assert_array_equal(mine.memory, plain.memory)
    assert mine.hashes() == plain.hashes()
    mine.set_all(0xEE)
    assert (mine.memory == 0xEE).all()


@pytest.mark.anyio
async def test_nixl_writes_into_them_and_from_them() -> None:
    tensors, plain = TensorPages(), Pages()
    async with open_nixl(tensors, "of-tensors") as ours, open_nixl(plain, "of-plain-memory") as theirs:
        await ours.connect(theirs.endpoint)
        await theirs.connect(ours.endpoint)
        for end in (ours, theirs):
            end.expect("never", 0)  # keeps its thread polling
        tensors.fill(1)
        await ours.write_pages("of-plain-memory", range(NUM_PAGES), range(NUM_PAGES), LATER_MS)
        assert plain.hashes() == tensors.hashes()
        plain.fill(2)
        await theirs.write_pages("of-tensors", range(NUM_PAGES), range(NUM_PAGES), LATER_MS)
        assert plain.hashes() == tensors.hashes()
