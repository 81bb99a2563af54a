"""Writes are joined until the end of a turn of the event loop."""

import asyncio
from typing import Any

import pytest

from components.http.writer import ConnectionWriter, HeldWrites

pytestmark = pytest.mark.anyio


class Recorded(asyncio.Transport):
    """Records the calls of a transport."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[Any] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.did.append(bytes(data))

    def close(self) -> None:
        self.closing = True
        self.did.append("close")

    def abort(self) -> None:
        self.closing = True
        self.did.append("abort")

    def write_eof(self) -> None:
        self.did.append("eof")

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 10


@pytest.fixture
def inner() -> Recorded:
    return Recorded()


@pytest.fixture
def writes() -> HeldWrites:
    return HeldWrites()


@pytest.fixture
def writer(inner: Recorded, writes: HeldWrites) -> ConnectionWriter:
    return ConnectionWriter(inner, writes)


async def test_what_is_not_held_leaves_at_once(writer: ConnectionWriter, inner: Recorded) -> None:
    writer.write(b"a")
    writer.write(bytearray(b"b"))
    assert inner.did == [b"a", b"b"]


async def test_a_head_leaves_with_its_body(writer: ConnectionWriter, inner: Recorded) -> None:
    writer.expect_head()
    writer.write(b"head ")
    assert inner.did == []
    assert writer.get_write_buffer_size() == 15
    writer.write(b"body")
    writer.write(b"more")
    assert inner.did == [b"head body", b"more"]
    await asyncio.sleep(0)
    assert inner.did == [b"head body", b"more"]


async def test_a_head_alone_leaves_at_the_end_of_the_turn(writer: ConnectionWriter, inner: Recorded) -> None:
    writer.expect_head()
    writer.write(b"head")
    await asyncio.sleep(0)
    assert inner.did == [b"head"]


async def test_held_writes_leave_after_all_that_was_ready(inner: Recorded, writes: HeldWrites) -> None:
    order: list[str] = []
    others = [Recorded() for _ in range(3)]
    connections = [ConnectionWriter(each, writes) for each in others]
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(connection: ConnectionWriter) -> None:
        await ready
        connection.write(b"a")
        order.append("made")

    for each in others:
        each.write = lambda data: order.append(bytes(data).decode())  # type: ignore[method-assign]
    tasks = [asyncio.create_task(answer(each)) for each in connections]
    await asyncio.sleep(0)
    with writes:
        ready.set_result(None)  # like a frame, which wakes several readers
        connections[0].write(b"b")
        order.append("dealt")
        connections[1].write(b"b")
    assert order == ["dealt", "b", "b"]
    order.clear()
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert order == ["made", "made", "made", "a", "a", "a"]
    connections[0].write(b"c")
    assert order[-1] == "c"


@pytest.mark.parametrize(("end", "seen"), [("close", [b"last", "close"]), ("write_eof", [b"last", "eof"])])
async def test_what_waits_is_sent_before_an_end(
    writer: ConnectionWriter, inner: Recorded, writes: HeldWrites, end: str, seen: list[Any]
) -> None:
    with writes:
        writer.write(b"last")
        getattr(writer, end)()
    await asyncio.sleep(0)
    assert inner.did == seen


async def test_an_abort_sends_nothing(writer: ConnectionWriter, inner: Recorded, writes: HeldWrites) -> None:
    with writes:
        writer.write(b"lost")
        writer.abort()
    await asyncio.sleep(0)
    assert inner.did == ["abort"]


async def test_nothing_is_written_to_a_connection_that_has_gone(
    writer: ConnectionWriter, inner: Recorded, writes: HeldWrites
) -> None:
    with writes:
        writer.write(b"late")
        inner.closing = True
    await asyncio.sleep(0)
    assert inner.did == []


async def test_nothing_follows_an_end(writer: ConnectionWriter, inner: Recorded) -> None:
    writer.write_eof()
    writer.write(b"late")
    assert inner.did == ["eof"]


async def test_a_connection_that_takes_no_more_holds_up_no_other(inner: Recorded, writes: HeldWrites) -> None:
    broken = Recorded()

    def refuse(data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("Cannot call write() after write_eof()")

    broken.write = refuse  # type: ignore[method-assign]
    first, second = ConnectionWriter(broken, writes), ConnectionWriter(inner, writes)
    for turn in (b"1", b"2"):
        with writes:
            first.write(turn)
            second.write(turn)
        await asyncio.sleep(0)
    assert not writes.held
    assert broken.did == ["abort"]
    assert inner.did == [b"1", b"2"]
