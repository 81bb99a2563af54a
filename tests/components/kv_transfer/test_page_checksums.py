import asyncio
import json
from collections.abc import Sequence
from zlib import crc32

import pytest
from msgspec.structs import replace

from components.errors import KvCorrupt, TransferFailed
from components.kv_transfer.aux import AuxBuffer, AuxRecord, slot_bytes
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.nixl_transfer import open_nixl
from components.messaging.clocks import now_ms
from components.wire.prefill import PagesOffered
from services.decode.inbound import InboundState
from services.prefill.outbound import OutboundState
from tests.components.kv_transfer.fake_transfer import LAYOUT, FakeTransfer, endpoint
from tests.components.kv_transfer.nixl_peer import LATER_MS, Pages
from tests.components.kv_transfer.nixl_peer import LAYOUT as LAYOUT_OF_PEER
from tests.components.kv_transfer.peer_process import Peer
from tests.components.kv_transfer.test_nixl_transfer import shared_peer, start_peer  # noqa: F401
from tests.services.decode.inbound import inbound
from tests.services.prefill.outbound import ROOM, chunk, last_chunk, outbound, run
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

OURS, THEIRS = [10, 11, 12, 13, 14], [90, 80, 70, 60, 50]
SLOT_BYTES = slot_bytes(16)


class Copying(FakeTransfer):
    """Copies bytes between two pools."""

    def __init__(self, pages: Pages, peer: "Copying | None" = None, room: int = 16) -> None:
        super().__init__(aux=AuxBuffer(8, max_checksums=room), peer=peer)
        self.pages = pages
        self.damaged: set[int] = set()  # the peer's pages

    async def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int) -> int:
        moved = await super().write_pages(agent, source, target, deadline_unix_ms)
        assert isinstance(self.peer, Copying)
        for ours, theirs in zip(source, target, strict=True):
            self.peer.pages.memory[theirs] = self.pages.memory[ours]
            self.peer.pages.memory[theirs, 5] ^= theirs in self.damaged
        return moved


class Pair:
    """Both ends of one transfer of five pages."""

    def __init__(
        self,
        sends: bool = True,
        checks: bool = True,
        num_cached: int = 0,
        aux_slot_bytes: int = SLOT_BYTES,
    ) -> None:
        mine, theirs = (Pages(layout=LAYOUT, num_pages=100) for _ in range(2))
        mine.fill(1)
        self.decode = Copying(theirs)
        self.prefill = Copying(mine, peer=self.decode)
        sending, checking = (PageChecksums(pages) if on else None for pages, on in ((mine, sends), (theirs, checks)))
        self.receiver = inbound(self.decode, checksums=checking)
        self.receiver.expose(0)
        self.sender = outbound(self.prefill, num_tokens=18, checksums=sending)
        offer = PagesOffered(
            request_id="r",
            room=ROOM,
            bootstrap_id="b",
            decode_id="d",
            decode_epoch="e",
            pages=THEIRS,
            num_cached_pages=num_cached,
            aux_slot=self.receiver.slot,
            deadline_unix_ms=now_ms() + 60_000,
        )
        self.sender.offered(offer, replace(endpoint(), aux_slot_bytes=aux_slot_bytes))
        self.tokens = range(num_cached * LAYOUT.page_size, 18)

    async def run(self) -> AuxRecord:
        sending = asyncio.create_task(run(self.sender))
        self.sender.computed(chunk(OURS, 9))
        await asyncio.sleep(0.01)
        self.sender.computed(last_chunk(OURS, 42, 0))
        await sending
        return await asyncio.wait_for(self.receiver.landed(THEIRS, self.tokens), PATIENCE_S)


async def test_each_page_has_the_checksum_of_its_own_bytes() -> None:
    pages = Pages()
    pages.fill(3)
    checksums = PageChecksums(pages).of_transfer(LAYOUT_OF_PEER.page_size)
    await checksums.add([5, 0, 63], range(40))  # the empty rest of the last page is sent too
    assert await checksums.total() == [crc32(pages.memory[i].tobytes()) for i in (5, 0, 63)]


@pytest.mark.parametrize("num_cached", [0, 2, 5])
async def test_pages_that_arrive_as_they_were_sent_are_believed(num_cached: int) -> None:
    pair = Pair(num_cached=num_cached)
    record = await pair.run()
    assert record.checksums == tuple(crc32(pair.prefill.pages.memory[p].tobytes()) for p in OURS[num_cached:])
    assert pair.receiver.lifecycle.state is InboundState.LANDED


@pytest.mark.parametrize(("damaged", "told"), [({60}, "1 of 5 .*: 60$"), ({50, 90}, "2 of 5 .*: 90, 50$")])
async def test_a_damaged_page_is_named_and_the_pages_stay_until_prefill_is_quiet(damaged: set[int], told: str) -> None:
    pair = Pair()
    pair.prefill.damaged = damaged
    with pytest.raises(KvCorrupt, match=told):
        await pair.run()
    assert pair.receiver.lifecycle.state is InboundState.TRANSFER
    assert pair.receiver.give_up() is InboundState.PINNED


async def test_pages_that_decode_held_before_are_not_checked() -> None:
    pair = Pair(num_cached=2)
    pair.decode.pages.fill(9)
    assert (await pair.run()).checksums is not None


async def test_a_damaged_aux_slot_is_not_believed() -> None:
    pair = Pair()
    sending = asyncio.create_task(run(pair.sender))
    pair.sender.computed(last_chunk(OURS, 42, 0))
    await sending
    pair.decode.aux._heads[pair.receiver.slot]["first_token"] = 43
    with pytest.raises(KvCorrupt, match="the aux slot was corrupted"):
        await pair.receiver.landed(THEIRS, pair.tokens)


async def test_a_prefill_that_sends_no_checksums_is_not_believed_where_they_are_wanted() -> None:
    with pytest.raises(TransferFailed, match="prefill sent no checksums"):
        await Pair(sends=False).run()
    assert (await Pair(sends=False, checks=False).run()).checksums is None


async def test_without_room_for_the_checksums_nothing_is_sent() -> None:
    pair = Pair(aux_slot_bytes=slot_bytes(0))
    pair.sender.computed(last_chunk(OURS, 42, 0))
    with pytest.raises(TransferFailed, match="it has 5 checksums, but aux slots hold 0"):
        await run(pair.sender)
    assert not pair.prefill.writes
    assert pair.sender.lifecycle.state is OutboundState.FAILED


@pytest.mark.parametrize("room", [0, 40, 200])
async def test_slots_of_different_lengths_carry_what_both_have_room_for(room: int, shared_peer: Peer) -> None:  # noqa: F811
    """The peer's slots have room for 64 checksums."""
    record = AuxRecord(9, 3, 42, 1, tuple(range(100, 100 + min(room, 64))) if room else None)
    async with open_nixl(Pages(), f"prefill-{room}", max_request_pages=room) as transfer:
        await transfer.connect(shared_peer.endpoint)
        for slot in (0, 3):  # another place for another slot, on both sides
            shared_peer.say(f"expect {room}-{slot} {slot}")
            transfer.aux.write(transfer.aux.num_slots - 1 - slot, record)
            await transfer.write_aux(
                shared_peer.endpoint.agent, transfer.aux.num_slots - 1 - slot, slot, f"{room}-{slot}", LATER_MS
            )
            landed = json.loads(shared_peer.read())["aux"][slot]
            assert landed["stamp"] == 9
            assert landed["intact"]
            assert tuple(landed["checksums"] or ()) == (record.checksums or ())
