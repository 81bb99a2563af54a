import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from components.errors import TransferFailed
from components.kv_transfer.aux import HEAD, AuxBuffer, AuxRecord
from components.kv_transfer.doorbell import DoorbellServer, connect
from components.wire.codec import pack, unpack
from components.wire.doorbell import Ring, RingAcknowledged
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def aux() -> AuxBuffer:
    return AuxBuffer(4)


@pytest.fixture
async def doorbell(aux: AuxBuffer) -> AsyncIterator[DoorbellServer]:
    opened = DoorbellServer("decode-d", "127.0.0.1", aux.put)
    async with opened.listening():
        yield opened


def _frame(message: object) -> bytes:
    packed = pack(message)
    return len(packed).to_bytes(4, "big") + packed


def _record(stamp: int) -> bytes:
    buffer = AuxBuffer(1)
    buffer.write(0, AuxRecord(stamp, 3, -1, 2))
    return buffer.raw(0)


async def test_a_ring_fills_the_slot_before_it_is_acknowledged(doorbell: DoorbellServer, aux: AuxBuffer) -> None:
    client = await connect(doorbell.address, "decode-d")
    expected = doorbell.expect("room")
    await client.ring(Ring(notification="room", aux_slot=2, aux=_record(9)))
    assert expected.done()
    assert aux.read(2) == AuxRecord(9, 3, -1, 2)
    await client.close()


async def test_a_late_ring_does_not_change_a_reused_slot(doorbell: DoorbellServer, aux: AuxBuffer) -> None:
    client = await connect(doorbell.address, "decode-d")
    doorbell.expect("room").cancel()
    await asyncio.sleep(0)
    for text in ("room", "never", ""):
        await client.ring(Ring(notification=text, aux_slot=2, aux=_record(9)))
    assert aux.read(2).stamp == 0
    await client.close()


async def test_it_is_the_right_process_or_none(doorbell: DoorbellServer) -> None:
    with pytest.raises(TransferFailed, match="'decode-d' answers at the address of 'decode-e'"):
        await connect(doorbell.address, "decode-e")
    for nowhere in ("", "nonsense", "127.0.0.1:1", "127.0.0.1:99999"):
        with pytest.raises(TransferFailed, match="decode-e"):
            await connect(nowhere, "decode-e")


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x00",
        _frame(RingAcknowledged(agent="x")),
        _frame(Ring(notification="room", aux_slot=4, aux=bytes(HEAD.itemsize))),
        _frame(Ring(notification="room", aux=b"short")),
    ],
)
async def test_who_sends_nonsense_is_hung_up_on_and_others_are_served(
    doorbell: DoorbellServer, caplog: pytest.LogCaptureFixture, frame: bytes
) -> None:
    expected = doorbell.expect("room")
    reader, writer = await asyncio.open_connection(*doorbell.address.split(":"))
    writer.write(frame)
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    await writer.wait_closed()
    assert caplog.messages == ["doorbell: client dropped"]
    assert not expected.done()
    client = await connect(doorbell.address, "decode-d")
    await client.ring(Ring(notification="room", aux=_record(1)))
    assert expected.done()
    await client.close()


async def test_a_close_fails_the_rings_in_flight() -> None:
    """The peer hangs after the client has connected."""

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(_frame(Ring())))
        writer.write(_frame(RingAcknowledged(agent="decode-d")))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        client = await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "decode-d")
        ringing = [asyncio.create_task(client.ring(Ring())) for _ in range(3)]
        assert not (await asyncio.wait(ringing, timeout=0.1))[0]
        await client.close()
        for ring in ringing:
            with pytest.raises(TransferFailed, match="decode-d does not answer"):
                await ring
        assert client.is_broken
    await asyncio.sleep(0.05)  # the server's side closes too


async def test_a_cancelled_ring_does_not_leave_its_answer_to_the_next() -> None:
    taken_in = []

    async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                ring = unpack(await reader.readexactly(size), Ring)
                await asyncio.sleep(0.1)
                taken_in.append(ring.notification)
                writer.write(_frame(RingAcknowledged(agent="decode-d")))
        writer.close()

    async with await asyncio.start_server(answer_slowly, "127.0.0.1", 0) as server:
        client = await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "decode-d")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.ring(Ring(notification="cancelled"))
        await client.ring(Ring(notification="next"))
        assert taken_in == ["", "cancelled", "next"]
        await client.close()
        await asyncio.sleep(0.05)  # the server's side closes too


async def test_a_closed_bell_answers_no_caller() -> None:
    doorbell = DoorbellServer("decode-d", "127.0.0.1", None)
    async with doorbell.listening():
        client = await connect(doorbell.address, "decode-d")
    with pytest.raises(TransferFailed, match="decode-d does not answer"):
        await client.ring(Ring())
    assert client.is_broken
    await client.close()
