"""Verification over real NIXL, with another process, whose pages are larger, smaller and equal."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.nixl_transfer import NixlTransfer, open_nixl
from components.kv_transfer.pieces import Pieces
from components.messaging.clocks import now_ms
from components.wire.prefill import PagesOffered
from tests.components.kv_transfer.nixl_peer import LATER_MS, NUM_PAGES, Pages, of_size
from tests.components.kv_transfer.peer_process import Peer, StartPeer
from tests.components.kv_transfer.test_nixl_transfer import start_peer  # noqa: F401
from tests.services.prefill.outbound import chunk, last_chunk, outbound, run

pytestmark = pytest.mark.anyio

NUM_TOKENS = 300
THEIRS = 64


class Damaging:
    """A NixlTransfer that then writes a piece of its first write again with one bit flipped."""

    def __init__(self, transfer: NixlTransfer, pages: Pages) -> None:
        self.endpoint, self.aux = transfer.endpoint, transfer.aux
        self.connect, self.write_aux = transfer.connect, transfer.write_aux
        self._transfer = transfer
        self._pages = pages
        self._done = False

    async def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int) -> int:
        moved = await self._transfer.write_pages(agent, source, target, deadline_unix_ms)
        size = self._pages.layout.page_bytes
        await self._damage(agent, source[0] * size + 100, target[0] * size + 100, 64)
        return moved

    async def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> int:
        moved = await self._transfer.write_pieces(agent, pieces, deadline_unix_ms)
        await self._damage(agent, int(pieces.source[7]), int(pieces.target[7]), int(pieces.length[7]))
        return moved

    async def _damage(self, agent: str, source: int, target: int, size: int) -> None:
        if self._done:
            return
        self._done = True
        spare = self._pages.memory[-1]  # unused
        spare[:size] = self._pages.memory.reshape(-1)[source : source + size]
        spare[size // 2] ^= 1
        piece = Pieces(*(np.array([n]) for n in (self._pages.memory.nbytes - spare.nbytes, target, size)))
        await self._transfer.write_pieces(agent, piece, LATER_MS)


async def _send(transfer: NixlTransfer, pages: Pages, peer: Peer, room: str, *, damaged: bool) -> str:
    """Send a prompt in two chunks; return the other process's verdict."""
    endpoint, theirs = peer.endpoint, [4, 2, 0, 1, 3]
    ours = list(range(pages.layout.pages_for(NUM_TOKENS)))[::-1]
    slot = int(peer.say(f"receive {room} {NUM_TOKENS} {pages.layout.page_size} {' '.join(map(str, theirs))}"))
    through = Damaging(transfer, pages) if damaged else transfer
    sender = outbound(through, NUM_TOKENS, stamp=1, checksums=PageChecksums(pages))
    sender.offered(_offer(room, theirs, slot), endpoint)
    sending = asyncio.create_task(run(sender))
    sender.computed(chunk(ours, 170))
    await asyncio.sleep(0.02)
    sender.computed(last_chunk(ours, 42, 0))
    await sending
    return (await asyncio.to_thread(peer.read)).strip()


def _offer(room: str, pages: list[int], slot: int) -> PagesOffered:
    return PagesOffered(
        request_id="r",
        room=room,
        bootstrap_id="b",
        decode_id="d",
        decode_epoch="e",
        pages=pages,
        num_cached_pages=0,
        aux_slot=slot,
        deadline_unix_ms=now_ms() + 60_000,
    )


async def test_a_bit_that_changes_in_one_piece_is_found_between_pages_of_any_two_sizes(
    start_peer: StartPeer,  # noqa: F811
) -> None:
    peer = start_peer("decode-verifies", page_size=THEIRS)
    for size, named in ((16, "1 of 5 pages"), (64, "1 of 5 pages"), (128, "2 of 5 pages")):
        pages = of_size(size)
        pages.fill(size)
        async with open_nixl(pages, f"prefill-{size}", max_request_pages=NUM_PAGES) as transfer:
            assert await _send(transfer, pages, peer, f"sound-{size}", damaged=False) == "landed"
            told = await _send(transfer, pages, peer, f"damaged-{size}", damaged=True)
            assert told.startswith(f"KvCorrupt: {named} did not arrive as prefill sent them: "), told
