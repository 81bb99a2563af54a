"""Decoding any bytes gives a message or MalformedMessage, and a message survives encoding."""

import asyncio
import contextlib
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from components.errors import MalformedMessage, MeshError
from components.kv_transfer.aux import HEAD, AuxBuffer
from components.messaging.inbox import StreamInbox
from components.messaging.refusals import Refusals
from components.wire.codec import pack, unpack
from components.wire.generate import StreamItem, TokenFrame, num_seqs, unpack_frame
from components.wire.instances import InstanceRecord, dump_record, load_record
from components.wire.kv_events import KvEventBatch, pack_batch, unpack_batch
from components.wire.logprobs import unpack_logprobs
from components.wire.refused import Refused, raised
from components.wire.tokens import unpack_tokens
from tests.components.messaging.frames import Read, nothing_lost
from tests.components.wire.frames import frame_of
from tests.components.wire.test_kv_event_batches import batches
from tests.components.wire.test_wire_frames import frames
from tests.components.wire.test_wire_messages import MESSAGES, instances
from tests.fuzz.mutations import WIRE, damaged, twisted

messages = st.sampled_from(MESSAGES).flatmap(instances)


def _message(data: bytes) -> None:
    try:
        value = unpack(data, *MESSAGES)
    except MalformedMessage:
        return
    assert pack(unpack(pack(value), *MESSAGES)) == pack(value)  # as bytes, for NaN is not equal to itself


def _frame(data: bytes) -> None:
    try:
        frame = unpack_frame(data)
    except MalformedMessage:
        return
    assert isinstance(frame, TokenFrame)
    with contextlib.suppress(OverflowError, ValueError):  # numbers that are never sent
        assert unpack_frame(frame.pack()).pack() == frame.pack()


def _batch(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        assert isinstance(unpack_batch(data), KvEventBatch)


@given(messages.flatmap(lambda value: damaged(pack(value))))
def test_a_damaged_message_is_refused_or_a_message(data: bytes) -> None:
    _message(data)


@given(messages.flatmap(lambda value: twisted(msgpack.unpackb(pack(value)), WIRE)))
def test_a_message_with_other_fields_is_refused_or_a_message(value: Any) -> None:
    _message(msgpack.packb(value))


@given(frames.flatmap(lambda frame: damaged(frame.pack())))
def test_a_damaged_frame_is_refused_or_a_frame(data: bytes) -> None:
    _frame(data)


@given(frames.flatmap(lambda frame: twisted(msgpack.unpackb(frame.pack()), WIRE)))
def test_a_frame_with_other_fields_is_refused_or_a_frame(value: Any) -> None:
    _frame(msgpack.packb(value))


@given(batches.flatmap(lambda batch: damaged(pack_batch(batch)) | twisted(msgpack.unpackb(pack_batch(batch)), WIRE)))
def test_kv_events_are_refused_or_a_batch(value: Any) -> None:
    _batch(value if isinstance(value, bytes) else msgpack.packb(value))


@given(instances(InstanceRecord).flatmap(lambda record: damaged(dump_record(record))))
def test_a_damaged_instance_record_is_refused_or_a_record(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        assert load_record(dump_record(load_record(data))) == load_record(data)


@given(st.binary(max_size=64), st.integers(0, 20))
def test_tokens_and_log_probabilities_of_any_bytes_are_refused_or_lists(data: bytes, count: int) -> None:
    with contextlib.suppress(MalformedMessage):
        assert len(unpack_tokens(data)) * 4 == len(data)
    with contextlib.suppress(MalformedMessage):
        assert len(unpack_logprobs(data, count)) == count


@given(st.binary(min_size=0, max_size=HEAD.itemsize + 64), st.integers(-2, 5))
def test_any_bytes_in_an_aux_slot_can_be_read(data: bytes, slot: int) -> None:
    buffer = AuxBuffer(4, 8)
    with contextlib.suppress(MalformedMessage):
        buffer.put(slot, data)
        buffer.read(slot)
        buffer.raw(slot)


@given(st.builds(Refused, error=st.text(max_size=20) | st.sampled_from(["QueueFull", "PeerLost"]), message=st.text()))
def test_any_refusal_is_an_error_of_ours(refused: Refused) -> None:
    assert isinstance(raised(refused), MeshError)


@given(st.lists(frames.flatmap(lambda frame: damaged(frame.pack()) | st.just(frame.pack())), max_size=4))
def test_an_inbox_takes_anything_and_its_readers_get_tokens_or_errors_of_ours(sent: list[bytes]) -> None:
    async def run() -> None:
        inbox = StreamInbox("s", nothing_lost, Refusals())
        streams = [inbox.open("i", "e") for _ in range(3)]
        for data in sent:
            await inbox.receive(Msg(_client=None, subject="s", data=data))
        for stream in streams:
            stream.fail(MeshError("over"))
            assert isinstance(Read(stream).error, MeshError)

    asyncio.run(run())


@st.composite
def _items(draw: st.DrawFn) -> bytes:
    """Draw a frame of the instance of the streams, with their items, often in order."""
    errors = st.sampled_from([None, Refused(error="PeerLost", message="m"), Refused(error="X", message="")])
    items = [
        StreamItem(
            draw(st.integers(-1, 3)),
            draw(st.integers(-1, 3)),
            draw(st.lists(st.integers(-1, 5), max_size=3)),
            draw(st.sampled_from([None, "stop", "length", "", "else"])),
            draw(errors),
            draw(st.integers(-1, 2**63)),
            draw(st.integers(-1, 2**63)),
        )
        for _ in range(draw(st.integers(0, 8)))
    ]
    return frame_of(draw(st.sampled_from(["i", "j"])), "e", 1, items, draw(st.integers(0, 3))).pack()


@given(st.lists(_items(), max_size=4))
def test_numbers_that_come_twice_or_leave_gaps_end_streams_with_errors_of_ours(sent: list[bytes]) -> None:
    async def run() -> None:
        refusals = Refusals()
        inbox = StreamInbox("s", nothing_lost, refusals)
        streams = [inbox.open("i", "e") for _ in range(3)]
        for data in sent:
            await inbox.receive(Msg(_client=None, subject="s", data=data))
        for stream in streams:
            read = Read(stream)
            stream.fail(MeshError("over"))
            numbers = [item.seq + i for item in read.items for i in range(num_seqs(item.token_ids))]
            assert numbers == list(range(len(numbers)))

    asyncio.run(run())
