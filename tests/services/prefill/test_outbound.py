import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from components.errors import DeadlineExceeded, IncompatibleLayout, TransferFailed
from components.kv_transfer import backend
from components.kv_transfer.aux import AuxRecord
from components.messaging.clocks import now_ms
from components.wire.prefill import PagesOffered
from engine.ports import Exposed
from services.prefill.outbound import OutboundState, OutboundTransfer
from tests.components.kv_transfer.fake_transfer import LAYOUT, FakeTransfer, endpoint
from tests.services.prefill.outbound import ROOM, STAMP, chunk, last_chunk, outbound, run
from tests.waiting import PATIENCE_S, turns

pytestmark = pytest.mark.anyio

OURS = [10, 11, 12, 13, 14]
THEIRS = [90, 80, 70, 60, 50]


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


def sending(transfer: FakeTransfer) -> tuple[OutboundTransfer, asyncio.Task[None]]:
    sender = outbound(transfer, num_tokens=18)
    return sender, asyncio.create_task(run(sender))


async def test_pages_leave_as_they_are_computed_and_the_aux_slot_last() -> None:
    decode = FakeTransfer()
    prefill = FakeTransfer(peer=decode)
    sender, task = sending(prefill)
    landed = decode.expect(ROOM, 0)
    sender.computed(chunk(OURS, 7))  # one page and three quarters
    await turns()
    assert sender.lifecycle.state is OutboundState.BOOTSTRAPPING
    assert not prefill.writes
    sender.offered(offer(), endpoint())
    await turns()
    assert prefill.writes == [([10], [90])]
    sender.computed(chunk(OURS, 16))
    await turns()
    assert prefill.writes[1:] == [([11, 12, 13], [80, 70, 60])]
    assert not landed.done()
    sender.computed(last_chunk(OURS, 42, 4))
    await task
    assert prefill.writes[2:] == [([14], [50])]
    assert landed.done()
    assert decode.aux.read(3) == AuxRecord(STAMP, 5, 42, 4)
    assert sender.lifecycle.state is OutboundState.DONE
    assert sender.num_bytes == 5 * LAYOUT.page_bytes
    assert prefill.aux.num_free == prefill.aux.num_slots


async def test_the_last_pages_are_announced_before_they_are_written() -> None:
    prefill = FakeTransfer()
    announced: list[tuple[str, int | None, int]] = []

    async def announce(offer: PagesOffered, last: Exposed) -> None:
        announced.append((offer.room, last.first_token, len(prefill.writes)))

    sender = outbound(prefill, num_tokens=18, announce=announce)
    task = asyncio.create_task(run(sender))
    sender.offered(offer(), endpoint())
    sender.computed(chunk(OURS, 8))
    await turns()
    assert not announced
    sender.computed(last_chunk(OURS, 42, 0))
    await task
    assert announced == [(ROOM, 42, 1)]


async def test_what_was_computed_before_the_offer_leaves_in_one_write() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.computed(last_chunk(OURS, 1, 0))
    sender.offered(offer(), endpoint())
    await task
    assert prefill.writes == [(OURS, THEIRS)]


@pytest.mark.parametrize("cached", [0, 1, 4, 5])
async def test_nothing_is_sent_for_pages_that_decode_has(cached: int) -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(offer(cached), endpoint())
    sender.computed(chunk(OURS, 8))
    await turns()
    sender.computed(last_chunk(OURS, 1, 0))
    await task
    sent = [pair for ours, theirs in prefill.writes for pair in zip(ours, theirs, strict=True)]
    assert sent == list(zip(OURS, THEIRS, strict=True))[cached:]


async def test_a_second_offer_changes_nothing() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(offer(), endpoint())
    sender.offered(offer(pages=[0] * 5), endpoint("stranger"))
    sender.computed(last_chunk(OURS, 1, 0))
    await task
    assert prefill.connected == ["decode-d"]
    assert prefill.writes == [(OURS, THEIRS)]


async def test_a_failed_write_ends_the_transfer_and_gives_the_slot_back() -> None:
    prefill = FakeTransfer(failure=TransferFailed("lost"))
    sender, task = sending(prefill)
    sender.offered(offer(), endpoint())
    sender.computed(last_chunk(OURS, 1, 0))
    with pytest.raises(TransferFailed):
        await task
    assert sender.lifecycle.state is OutboundState.FAILED
    assert prefill.aux.num_free == prefill.aux.num_slots


async def test_another_layout_is_refused_before_any_byte_moves() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.computed(last_chunk(OURS, 1, 0))
    sender.offered(offer(), endpoint(layout=replace(LAYOUT, dtype="bfloat16", page_size=6)))
    with pytest.raises(IncompatibleLayout, match=r"dtype: float32 here, bfloat16 there, page_size: 4 here, 6 there"):
        await task
    assert not prefill.writes


async def test_a_sender_gives_up_when_decode_offers_nothing() -> None:
    prefill = FakeTransfer()
    sender = outbound(prefill, num_tokens=18, bootstrap_timeout_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"decode did not offer its pages within 0\.02 s"):
        await asyncio.wait_for(run(sender), PATIENCE_S)
    sender.offered(offer(), endpoint())
    assert sender.lifecycle.state is OutboundState.FAILED
    assert not prefill.connected


async def test_a_transfer_that_takes_too_long_is_given_up_when_its_write_is_over() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(replace(offer(), deadline_unix_ms=now_ms() + 300), endpoint())
    prefill.gate.clear()
    sender.computed(last_chunk(OURS, 1, 0))
    await asyncio.sleep(0.4)
    assert not task.done(), "decode may not hear that it is over while a write is in flight"
    prefill.gate.set()
    with pytest.raises(DeadlineExceeded, match="the transfer did not finish within"):
        await task
    assert prefill.in_flight == 0
    assert sender.lifecycle.state is OutboundState.FAILED


@pytest.mark.parametrize("stage", ["pages", "aux"])
async def test_a_sender_that_was_stopped_writes_nothing_after_the_offers_deadline(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs before its timer's callback. Decode may have reused the pages and the aux slot."""
    decode = FakeTransfer()
    prefill = FakeTransfer(peer=decode)
    sender, task = sending(prefill)
    landed = decode.expect(ROOM, 0)
    offered = offer(num_cached_pages=5 if stage == "aux" else 0)
    sender.offered(offered, endpoint())
    await turns()
    monkeypatch.setattr(backend, "time", SimpleNamespace(time=lambda: offered.deadline_unix_ms / 1000))
    sender.computed(last_chunk(OURS, 42, 4))
    with pytest.raises(DeadlineExceeded, match="the deadline of the offer passed before the write"):
        await task
    assert not prefill.writes
    assert not landed.done()
    assert sender.lifecycle.state is OutboundState.FAILED


@pytest.mark.parametrize("stage", ["pages", "aux"])
@pytest.mark.parametrize("failure", [None, TransferFailed("lost")])
async def test_a_cancelled_sender_is_over_only_when_its_write_is(stage: str, failure: TransferFailed | None) -> None:
    """The pages are reused after a cancellation, which may be repeated while it waits."""
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    sender.offered(offer(num_cached_pages=5 if stage == "aux" else 0), endpoint())
    prefill.gate.clear()
    sender.computed(last_chunk(OURS, 1, 0))
    await turns()
    assert prefill.in_flight == 1
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    prefill.failure = failure
    prefill.gate.set()
    await asyncio.wait((task,), timeout=PATIENCE_S)
    assert task.cancelled()
    assert sender.lifecycle.state is OutboundState.FAILED
    assert prefill.in_flight == 0
    assert len(prefill.writes) == (1 if stage == "pages" else 0)
    assert prefill.aux.num_free == prefill.aux.num_slots


async def test_a_sender_cancelled_before_the_offer_writes_nothing() -> None:
    prefill = FakeTransfer()
    sender, task = sending(prefill)
    await turns()
    task.cancel()
    await asyncio.wait((task,))
    sender.offered(offer(), endpoint())
    sender.computed(last_chunk(OURS, 1, 0))
    await turns()
    assert not prefill.writes
    assert sender.lifecycle.state is OutboundState.FAILED
