import asyncio

import pytest
from msgspec.structs import replace

from components.errors import DeadlineExceeded, IllegalTransition, IncompatibleLayout, QueueFull, TransferFailed
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.receiver import Receiver, ReceiveState
from components.kv_transfer.sender import Sender, SendState
from components.messaging.deadline import now_ms
from components.wire.rooms import PagesOffered
from tests.components.kv_transfer.fake_transfer import LAYOUT, FakeTransfer, endpoint

pytestmark = pytest.mark.anyio

ROOM, STAMP = "boot/1", 77
OURS = [10, 11, 12, 13, 14]
THEIRS = [90, 80, 70, 60, 50]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def offer(num_cached_pages: int = 0, pages: list[int] | None = None, aux_slot: int = 3) -> PagesOffered:
    return PagesOffered(
        request_id="r",
        room=ROOM,
        bootstrap_id="b",
        decode_id="d",
        decode_epoch="e",
        pages=THEIRS if pages is None else pages,
        num_cached_pages=num_cached_pages,
        aux_slot=aux_slot,
        deadline_unix_ms=now_ms() + 60_000,
    )


def sending(transfer: FakeTransfer) -> tuple[Sender, asyncio.Task[None]]:
    sender = Sender(transfer, "r", num_tokens=18)
    return sender, asyncio.create_task(sender.run())


async def test_pages_leave_as_they_are_computed_and_the_aux_slot_last() -> None:
    decode = FakeTransfer()
    prefill = FakeTransfer(peer=decode)
    sender, task = sending(prefill)
    landed = decode.expect(ROOM, 0)
    sender.computed(OURS, 7)  # one page and three quarters
    await turns()
    assert sender.lifecycle.state is SendState.BOOTSTRAPPING
    assert not prefill.writes
    sender.offered(offer(), endpoint(), STAMP)
    await turns()
    assert prefill.writes == [([10], [90])]
    sender.computed(OURS, 16)
    await turns()
    assert prefill.writes[1:] == [([11, 12, 13], [80, 70, 60])]
    assert not landed.done()
    sender.completed(OURS, first_token=42, num_cached_tokens=4)
    await task
    assert prefill.writes[2:] == [([14], [50])]
    assert landed.done()
    assert decode.aux.read(3) == AuxRecord(STAMP, 5, 42, 4)
    assert sender.lifecycle.state is SendState.DONE
    assert sender.num_bytes == 5 * LAYOUT.page_bytes
    assert prefill.aux.num_free == prefill.aux.num_slots


async def test_the_last_pages_are_announced_before_they_are_written() -> None:
    prefill = FakeTransfer()
    announced: list[tuple[str, int]] = []

    async def announce(offer: PagesOffered) -> None:
        announced.append((offer.room, len(prefill.writes)))

    sender = Sender(prefill, "r", num_tokens=18, announce=announce)
    task = asyncio.create_task(sender.run())
    sender.offered(offer(), endpoint(), STAMP)
    sender.computed(OURS, 8)
    await turns()
    assert not announced
    sender.completed(OURS, 42, 0)
    await task
    assert announced == [(ROOM, 1)]


async def test_what_was_computed_before_the_offer_leaves_in_one_write() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.completed(OURS, 1, 0)
    sender.offered(offer(), endpoint(), STAMP)
    await task
    assert prefill.writes == [(OURS, THEIRS)]


@pytest.mark.parametrize("cached", [0, 1, 4, 5])
async def test_nothing_is_sent_for_pages_that_decode_has(cached: int) -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(offer(cached), endpoint(), STAMP)
    sender.computed(OURS, 8)
    await turns()
    sender.completed(OURS, 1, 0)
    await task
    sent = [pair for ours, theirs in prefill.writes for pair in zip(ours, theirs, strict=True)]
    assert sent == list(zip(OURS, THEIRS, strict=True))[cached:]


async def test_a_second_offer_changes_nothing() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(offer(), endpoint(), STAMP)
    sender.offered(offer(pages=[0] * 5), endpoint("stranger"), 1)
    sender.completed(OURS, 1, 0)
    await task
    assert prefill.connected == ["decode-d"]
    assert prefill.writes == [(OURS, THEIRS)]


async def test_a_failed_write_ends_the_transfer_and_gives_the_slot_back() -> None:
    prefill = FakeTransfer(failure=TransferFailed("lost"))
    sender, task = sending(prefill)
    sender.offered(offer(), endpoint(), STAMP)
    sender.completed(OURS, 1, 0)
    with pytest.raises(TransferFailed):
        await task
    assert sender.lifecycle.state is SendState.FAILED
    assert prefill.aux.num_free == prefill.aux.num_slots


async def test_another_layout_is_refused_before_any_byte_moves() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.completed(OURS, 1, 0)
    sender.offered(offer(), endpoint(layout=replace(LAYOUT, dtype="bfloat16", page_size=6)), STAMP)
    with pytest.raises(IncompatibleLayout, match=r"dtype: float32 here, bfloat16 there, page_size: 4 here, 6 there"):
        await task
    assert not prefill.writes


async def test_a_sender_gives_up_when_decode_offers_nothing() -> None:
    prefill = FakeTransfer()
    sender = Sender(prefill, "r", num_tokens=18, bootstrap_timeout_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"decode did not offer its pages in 0\.02 s"):
        await asyncio.wait_for(sender.run(), 5)
    sender.offered(offer(), endpoint(), STAMP)
    assert sender.lifecycle.state is SendState.FAILED
    assert not prefill.connected


async def test_a_transfer_that_takes_too_long_is_given_up_when_its_write_is_over() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(replace(offer(), deadline_unix_ms=now_ms() + 50), endpoint(), STAMP)
    prefill.gate.clear()
    sender.completed(OURS, 1, 0)
    await asyncio.sleep(0.1)
    assert not task.done(), "decode may not hear that it is over while a write is in flight"
    prefill.gate.set()
    with pytest.raises(DeadlineExceeded, match="the transfer did not end in"):
        await task
    assert prefill.in_flight == 0
    assert sender.lifecycle.state is SendState.FAILED


@pytest.mark.parametrize("stage", ["pages", "aux"])
@pytest.mark.parametrize("failure", [None, TransferFailed("lost")])
async def test_a_cancelled_sender_is_over_only_when_its_write_is(stage: str, failure: TransferFailed | None) -> None:
    """Whoever cancelled it reuses the pages; and it may be cancelled again while it waits."""
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(offer(num_cached_pages=5 if stage == "aux" else 0), endpoint(), STAMP)
    prefill.gate.clear()
    sender.completed(OURS, 1, 0)
    await turns()
    assert prefill.in_flight == 1
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    prefill.failure = failure
    prefill.gate.set()
    await asyncio.wait((task,), timeout=5)
    assert task.cancelled()
    assert sender.lifecycle.state is SendState.FAILED
    assert prefill.in_flight == 0
    assert len(prefill.writes) == (1 if stage == "pages" else 0)
    assert prefill.aux.num_free == prefill.aux.num_slots


async def test_a_sender_cancelled_before_the_offer_writes_nothing() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    await turns()
    task.cancel()
    await asyncio.wait((task,))
    sender.offered(offer(), endpoint(), STAMP)
    sender.completed(OURS, 1, 0)
    await turns()
    assert not prefill.writes
    assert sender.lifecycle.state is SendState.FAILED


@pytest.fixture
async def decode() -> FakeTransfer:
    return FakeTransfer()


async def test_what_landed_is_believed_by_its_stamp_and_gives_the_slot_back(decode: FakeTransfer) -> None:
    receiver = Receiver(decode, "r")
    receiver.offer(ROOM)
    landed = asyncio.create_task(receiver.landed(STAMP, 5))
    await turns()
    decode.land(ROOM, receiver.slot, AuxRecord(STAMP, 5, 42, 4))
    assert await landed == AuxRecord(STAMP, 5, 42, 4)
    assert receiver.lifecycle.state is ReceiveState.DONE
    assert decode.aux.num_free == decode.aux.num_slots
    assert receiver.abandon() is False
    assert decode.aux.num_free == decode.aux.num_slots


@pytest.mark.parametrize(("stamp", "num_pages"), [(STAMP + 1, 5), (STAMP, 4), (0, 0)])
async def test_another_rooms_stamp_is_a_failed_transfer_whose_pages_stay(
    decode: FakeTransfer, stamp: int, num_pages: int
) -> None:
    receiver = Receiver(decode, "r")
    receiver.offer(ROOM)
    decode.land(ROOM, receiver.slot, AuxRecord(stamp, num_pages, 42, 4))
    with pytest.raises(TransferFailed, match="the aux slot says stamp"):
        await receiver.landed(STAMP, 5)
    assert receiver.abandon() is True
    assert decode.aux.num_free == decode.aux.num_slots - 1
    receiver.close()
    assert decode.aux.num_free == decode.aux.num_slots


async def test_abandoned_before_the_offer_nothing_stays(decode: FakeTransfer) -> None:
    receiver = Receiver(decode, "r")
    assert receiver.abandon() is False
    assert receiver.lifecycle.state is ReceiveState.CLOSED
    assert decode.aux.num_free == decode.aux.num_slots
    with pytest.raises(IllegalTransition):
        receiver.offer(ROOM)


async def test_abandoned_after_the_offer_the_slot_stays_until_prefill_is_quiet(decode: FakeTransfer) -> None:
    """The room stays expected as well: over UCX a peer's write goes on only while this side polls."""
    receiver = Receiver(decode, "r")
    receiver.offer(ROOM)
    waiting = asyncio.create_task(receiver.landed(STAMP, 5))
    await turns()
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert receiver.abandon() is True
    assert receiver.abandon() is False
    assert receiver.lifecycle.state is ReceiveState.PINNED
    assert decode.aux.num_free == decode.aux.num_slots - 1
    assert ROOM in decode.expected
    receiver.close()
    await turns()
    assert decode.aux.num_free == decode.aux.num_slots
    assert not decode.expected
    with pytest.raises(IllegalTransition):
        receiver.close()


async def test_a_landing_after_the_abandoning_changes_nothing(decode: FakeTransfer) -> None:
    receiver = Receiver(decode, "r")
    receiver.offer(ROOM)
    assert receiver.abandon() is True
    decode.land(ROOM, receiver.slot, AuxRecord(STAMP, 5, 42, 4))
    receiver.close()
    assert receiver.lifecycle.state is ReceiveState.CLOSED
    assert decode.aux.num_free == decode.aux.num_slots


async def test_without_a_slot_there_is_no_transfer(decode: FakeTransfer) -> None:
    for _ in range(decode.aux.num_slots):
        decode.aux.take()
    with pytest.raises(QueueFull):
        Receiver(decode, "r")
