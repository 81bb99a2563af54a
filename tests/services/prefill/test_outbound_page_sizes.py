"""Prefill and decode with pages of different sizes: prefill writes exactly what decode's pages need."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from components.kv_transfer.aux import AuxRecord
from components.messaging.clocks import now_ms
from components.wire.prefill import PagesOffered
from tests.components.kv_transfer.fake_transfer import FakeTransfer, endpoint
from tests.components.kv_transfer.pools import LAYOUT, NUM_TOKENS, block_table, brute_force, copied, pool
from tests.services.prefill.outbound import ROOM, STAMP, chunk, last_chunk, outbound, run
from tests.waiting import turns

pytestmark = pytest.mark.anyio

PAIRS = [(16, 64), (64, 16), (128, 16), (16, 128), (32, 64), (128, 64)]
CHUNKS = (50, 100, 150, 170, 250)  # none ends with a page of any size


async def send(
    ours: int, theirs: int, cached_pages: int, chunks: tuple[int, ...], num_tokens: int = NUM_TOKENS
) -> tuple[FakeTransfer, FakeTransfer]:
    """One prompt from prefill to decode: both ends after it, prefill's with the pieces that it wrote."""
    here, there = replace(LAYOUT, page_size=ours), replace(LAYOUT, page_size=theirs)
    decode = FakeTransfer(endpoint("decode-d", layout=there))
    prefill = FakeTransfer(endpoint("prefill-p", layout=here), peer=decode)
    sender = outbound(prefill, num_tokens)
    task = asyncio.create_task(run(sender))
    pages = block_table(there, seed=2, num_tokens=num_tokens)
    offer = PagesOffered(
        request_id="r",
        room=ROOM,
        bootstrap_id="b",
        decode_id="d",
        decode_epoch="e",
        pages=pages,
        num_cached_pages=cached_pages,
        aux_slot=3,
        deadline_unix_ms=now_ms() + 60_000,
    )
    sender.offered(offer, decode.endpoint)
    table = block_table(here, seed=1, num_tokens=num_tokens)
    for num_computed in chunks:
        sender.computed(chunk(table, num_computed))
        await turns()
    sender.computed(last_chunk(table, 42, 0))
    await task
    assert not prefill.writes
    assert sender.num_bytes == sum(int(p.length.sum()) for p in prefill.pieces)
    return prefill, decode


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("chunks", [(), CHUNKS, (16, 16, 48, 64, 299)], ids=str)
@pytest.mark.parametrize("cached_pages", [0, 1, 2])
async def test_every_token_that_decode_lacks_lands_and_nothing_else_is_touched(
    ours: int, theirs: int, chunks: tuple[int, ...], cached_pages: int
) -> None:
    """Of the last page only the prompt's rows; of prefill's pages only the rows after decode's cached prefix."""
    prefill, decode = await send(ours, theirs, cached_pages, chunks)
    here, there = replace(LAYOUT, page_size=ours), replace(LAYOUT, page_size=theirs)
    source, target = pool(here, seed=3), pool(there, seed=4)
    table, pages = block_table(here, seed=1), block_table(there, seed=2)
    expected = brute_force(range(cached_pages * theirs, NUM_TOKENS), source, table, target, pages)
    for pieces in prefill.pieces:
        target = copied(pieces, source, target)
    np.testing.assert_array_equal(target, expected)
    assert decode.aux.read(3) == AuxRecord(STAMP, len(pages), 42, 0)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
async def test_chunks_cost_no_pieces_more_than_one_write(ours: int, theirs: int) -> None:
    """After a chunk whole small pages are sent, so no stripe is sent in two parts."""
    in_chunks, _ = await send(ours, theirs, 0, CHUNKS)
    at_once, _ = await send(ours, theirs, 0, ())
    assert len(in_chunks.pieces) > len(at_once.pieces) == 1
    assert sum(map(len, in_chunks.pieces)) == len(at_once.pieces[0])


async def test_a_chunk_leaves_before_the_larger_page_is_full() -> None:
    """Of 100 tokens, 96 are sent: six pages of 16, although decode's page of 128 is not full."""
    prefill, _ = await send(16, 128, 0, (100,))
    first, last = prefill.pieces
    row = LAYOUT.num_stripes * LAYOUT.row_bytes
    assert int(first.length.sum()) == 96 * row
    assert int(last.length.sum()) == (NUM_TOKENS - 96) * row


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 128, 129])
async def test_the_aux_slot_names_as_many_pages_as_decode_offered(ours: int, theirs: int, num_tokens: int) -> None:
    _, decode = await send(ours, theirs, 0, (), num_tokens)
    assert decode.aux.read(3).num_pages == -(-num_tokens // theirs)


async def test_nothing_is_written_when_decode_has_it_all() -> None:
    prefill, decode = await send(128, 16, 19, ())
    assert not prefill.pieces
    assert decode.aux.read(3).stamp == STAMP
