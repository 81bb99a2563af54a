import asyncio

import pytest

from components.errors import IllegalTransition, QueueFull, TransferFailed
from components.kv_transfer.aux import AuxRecord
from services.decode.inbound import InboundState
from tests.components.kv_transfer.fake_transfer import FakeTransfer
from tests.services.decode.inbound import ROOM, STAMP, inbound
from tests.waiting import turns

pytestmark = pytest.mark.anyio

SENT = ([90, 80, 70, 60, 50], range(18))
DEADLINE = 0


@pytest.fixture
async def decode() -> FakeTransfer:
    return FakeTransfer()


async def test_what_landed_is_believed_by_its_stamp_and_gives_the_slot_back(decode: FakeTransfer) -> None:
    receiver = inbound(decode)
    receiver.expose(DEADLINE)
    landed = asyncio.create_task(receiver.landed(*SENT))
    await turns()
    decode.land(ROOM, receiver.slot, AuxRecord(STAMP, 5, 42, 4))
    assert await landed == AuxRecord(STAMP, 5, 42, 4)
    assert receiver.lifecycle.state is InboundState.LANDED
    assert decode.aux.num_free == decode.aux.num_slots
    assert receiver.give_up() is InboundState.LANDED
    assert decode.aux.num_free == decode.aux.num_slots


@pytest.mark.parametrize(("stamp", "num_pages"), [(STAMP + 1, 5), (STAMP, 4), (0, 0)])
async def test_another_rooms_stamp_is_a_failed_transfer_whose_pages_stay(
    decode: FakeTransfer, stamp: int, num_pages: int
) -> None:
    receiver = inbound(decode)
    receiver.expose(DEADLINE)
    decode.land(ROOM, receiver.slot, AuxRecord(stamp, num_pages, 42, 4))
    with pytest.raises(TransferFailed, match="the aux slot belongs to another transfer"):
        await receiver.landed(*SENT)
    assert receiver.give_up() is InboundState.PINNED
    assert decode.aux.num_free == decode.aux.num_slots - 1
    receiver.close()
    assert decode.aux.num_free == decode.aux.num_slots


async def test_abandoned_before_the_offer_nothing_stays(decode: FakeTransfer) -> None:
    receiver = inbound(decode)
    assert receiver.give_up() is InboundState.CLOSED
    assert decode.aux.num_free == decode.aux.num_slots
    with pytest.raises(IllegalTransition):
        receiver.expose(DEADLINE)


async def test_abandoned_after_the_offer_the_slot_stays_until_prefill_is_quiet(decode: FakeTransfer) -> None:
    """The room stays expected too: over UCX a peer's write progresses only while this side polls."""
    receiver = inbound(decode)
    receiver.expose(DEADLINE)
    waiting = asyncio.create_task(receiver.landed(*SENT))
    await turns()
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert receiver.give_up() is InboundState.PINNED
    assert receiver.give_up() is InboundState.PINNED
    assert decode.aux.num_free == decode.aux.num_slots - 1
    assert ROOM in decode.expected
    receiver.close()
    await turns()
    assert decode.aux.num_free == decode.aux.num_slots
    assert not decode.expected
    with pytest.raises(IllegalTransition):
        receiver.close()


async def test_a_landing_after_the_abandoning_changes_nothing(decode: FakeTransfer) -> None:
    receiver = inbound(decode)
    receiver.expose(DEADLINE)
    assert receiver.give_up() is InboundState.PINNED
    decode.land(ROOM, receiver.slot, AuxRecord(STAMP, 5, 42, 4))
    receiver.close()
    assert receiver.lifecycle.state is InboundState.CLOSED
    assert decode.aux.num_free == decode.aux.num_slots


async def test_without_a_slot_there_is_no_transfer(decode: FakeTransfer) -> None:
    for _ in range(decode.aux.num_slots):
        decode.aux.take()
    with pytest.raises(QueueFull):
        inbound(decode)
