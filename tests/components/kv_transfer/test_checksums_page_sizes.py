"""Checksums where prefill and decode have pages of different sizes: both sum the same bytes, and each byte counts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from components.errors import KvCorrupt, TransferFailed
from components.kv_transfer.aux import AuxBuffer, AuxRecord
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.pieces import Pieces
from components.messaging.clocks import now_ms
from components.wire.layout import KvLayout
from components.wire.prefill import PagesOffered
from tests.components.kv_transfer.fake_transfer import FakeTransfer, endpoint
from tests.components.kv_transfer.pools import LAYOUT, Pool, block_table, brute_force, copied, pool
from tests.services.decode.inbound import inbound
from tests.services.prefill.outbound import ROOM, chunk, last_chunk, outbound, run

pytestmark = pytest.mark.anyio

SIZES = (4, 8, 16, 64)
UNEQUAL = [(a, b) for a, b in product(SIZES, SIZES) if a != b]


@dataclass
class Region:
    memory: Pool
    layout: KvLayout
    device: str = "cpu"

    @property
    def num_pages(self) -> int:
        return len(self.memory)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


def of_size(page_size: int) -> KvLayout:
    return replace(LAYOUT, page_size=page_size)


def summed(region: Region, peer_page_size: int, table: list[int], edges: Sequence[int]) -> list[int]:
    """Return the sums of the tokens between the first and last edge, added in parts that end at each."""
    checksums = PageChecksums(region).of_transfer(peer_page_size)

    async def run() -> None:
        for start, stop in pairwise(edges):
            await checksums.add(table, range(start, stop))

    asyncio.run(run())
    return asyncio.run(checksums.total())


@given(data=st.data(), sizes=st.sampled_from(UNEQUAL), seed=st.integers(0, 2**16))
def test_both_sides_agree_whatever_the_chunks_and_any_change_shows_in_the_pages_where_it_is(
    data: st.DataObject, sizes: tuple[int, int], seed: int
) -> None:
    ours, theirs = map(of_size, sizes)
    unit, large = min(sizes), max(sizes)
    num_tokens = data.draw(st.integers(1, 200))
    first = data.draw(st.integers(0, (num_tokens - 1) // unit)) * unit  # decode's cached pages may be the smaller ones
    cuts = data.draw(st.lists(st.integers(first // unit, (num_tokens - 1) // unit), max_size=3).map(sorted))
    edges = [first, *(cut * unit for cut in cuts), num_tokens]
    mine, table = pool(ours, seed), block_table(ours, seed + 2, num_tokens)
    pages = block_table(theirs, seed + 3, num_tokens)
    landed = brute_force(range(first, num_tokens), mine, table, pool(theirs, seed + 1), pages)
    sent = summed(Region(mine, ours), theirs.page_size, table, edges)
    tokens = range(first, num_tokens)
    there = PageChecksums(Region(landed, theirs)).of_transfer(ours.page_size)
    asyncio.run(there.add(pages, tokens))
    assert asyncio.run(there.total()) == sent
    assert len(sent) == there.num_sums(tokens) == (num_tokens - 1) // large - first // large + 1

    token = data.draw(st.integers(0, len(pages) * theirs.page_size - 1))
    at = (pages[token // theirs.page_size], *(data.draw(st.integers(0, n - 1)) for n in landed.shape[1:4]))
    landed[*at, token % theirs.page_size, 0] ^= np.uint16(1 << data.draw(st.integers(0, 15)))
    asyncio.run((again := PageChecksums(Region(landed, theirs)).of_transfer(ours.page_size)).add(pages, tokens))
    wrong = [i for i, (was, now) in enumerate(zip(sent, asyncio.run(again.total()), strict=True)) if was != now]
    assert wrong == ([token // large - first // large] if token in tokens else []), "only what was sent counts"
    for i in wrong:
        covered = again.covered(i, tokens)
        assert token // theirs.page_size in covered
        assert len(covered) <= max(1, large // theirs.page_size)


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_what_was_exchanged_is_seen(sizes: tuple[int, int]) -> None:
    """Rows, keys with values, heads, or whole small pages: a sum must depend on positions."""
    region = Region(pool(of_size(sizes[0]), 1), of_size(sizes[0]))
    table = block_table(region.layout, 2, 64)
    before = summed(region, sizes[1], table, [0, 64])
    first, second = (table[0], table[1]) if sizes[0] == 16 else (table[0], table[0])
    rows = (slice(0, 16), slice(0, 16)) if sizes[0] == 16 else (slice(0, 16), slice(16, 32))
    all_of = (slice(None), slice(None), slice(None))
    for one, other in (
        ((table[0], 0, 0, 0, 3), (table[0], 0, 0, 0, 4)),
        ((table[0], 0, 1, 0), (table[0], 0, 1, 1)),
        ((table[0], 0, 2), (table[0], 1, 2)),
        ((first, *all_of, rows[0]), (second, *all_of, rows[1])),
    ):
        region.memory[one], region.memory[other] = region.memory[other].copy(), region.memory[one].copy()
        assert summed(region, sizes[1], table, [0, 64])[0] != before[0]
        region.memory[one], region.memory[other] = region.memory[other].copy(), region.memory[one].copy()
    assert summed(region, sizes[1], table, [0, 64]) == before


class Copying(FakeTransfer):
    """Copies bytes into the peer's pool; can damage one piece."""

    def __init__(self, agent: str, layout: KvLayout, seed: int, room: int, peer: "Copying | None" = None) -> None:
        aux = AuxBuffer(8, max_checksums=room)
        super().__init__(replace(endpoint(agent, layout=layout), aux_slot_bytes=aux.slot_bytes), aux=aux, peer=peer)
        self.region = Region(pool(layout, seed), layout)
        self.damaged: int | None = None  # a piece of the first write

    async def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> int:
        moved = await super().write_pieces(agent, pieces, deadline_unix_ms)
        assert isinstance(self.peer, Copying)
        there = self.peer.region
        there.memory = copied(pieces, self.region.memory, there.memory)
        if self.damaged is not None and len(self.pieces) == 1:
            there.memory.view(np.uint8).reshape(-1)[pieces.target[self.damaged] + 5] ^= 1
        return moved


async def transferred(
    ours: int, theirs: int, *, cached: int = 0, room: int = 64, damaged: int | None = None
) -> tuple[AuxRecord, list[int]]:
    """One prompt of 150 tokens, in chunks; what decode believes, and the pages that it offered."""
    num_tokens = 150
    decode = Copying("decode-d", of_size(theirs), 2, room)
    prefill = Copying("prefill-p", of_size(ours), 1, room, peer=decode)
    prefill.damaged = damaged
    receiver = inbound(decode, checksums=PageChecksums(decode.region), page_size=ours)
    receiver.expose(0)
    sender = outbound(prefill, num_tokens, checksums=PageChecksums(prefill.region))
    table, pages = (block_table(of_size(size), 3, num_tokens) for size in (ours, theirs))
    offer = PagesOffered(
        request_id="r",
        room=ROOM,
        bootstrap_id="b",
        decode_id="d",
        decode_epoch="e",
        pages=pages,
        num_cached_pages=cached,
        aux_slot=receiver.slot,
        deadline_unix_ms=now_ms() + 60_000,
    )
    sender.offered(offer, decode.endpoint)
    sending = asyncio.create_task(run(sender))
    sender.computed(chunk(table, 90))
    while cached * theirs < 80 and not (prefill.pieces or sending.done()):  # at least 80 of 90 tokens are sent
        await asyncio.sleep(0.001)
    sender.computed(last_chunk(table, 42, 0))
    await sending
    receiver._checksums = PageChecksums(decode.region)  # `copied` made a new array
    return await receiver.landed(pages, range(cached * theirs, num_tokens)), pages


@pytest.mark.parametrize(("ours", "theirs"), UNEQUAL)
@pytest.mark.parametrize("cached", [0, 1, 2])
async def test_pieces_that_arrive_as_they_were_sent_are_believed(ours: int, theirs: int, cached: int) -> None:
    record, _ = await transferred(ours, theirs, cached=cached)
    large = max(ours, theirs)
    assert record.checksums is not None
    assert len(record.checksums) == 149 // large - cached * theirs // large + 1


async def test_a_damaged_piece_names_its_page_or_all_that_share_a_checksum() -> None:
    with pytest.raises(KvCorrupt, match=r"^1 of 3 pages .*: \d+$"):
        await transferred(16, 64, damaged=7)
    with pytest.raises(KvCorrupt, match=r"^4 of 10 pages .*: \d+, \d+, \d+, \d+$"):
        await transferred(64, 16, damaged=7)
    with pytest.raises(KvCorrupt, match=r"^3 of 9 pages .*: \d+, \d+, \d+$"):  # the first of the four was not sent
        await transferred(64, 16, cached=1, damaged=7)


async def test_there_are_no_more_checksums_than_the_side_with_larger_pages_has_room_for() -> None:
    for ours, theirs in ((16, 64), (64, 16)):
        record, _ = await transferred(ours, theirs, room=3)
        assert len(record.checksums or ()) == 3
    with pytest.raises(TransferFailed, match="it has 38 checksums, but aux slots hold 16"):
        await transferred(4, 4, room=16)
