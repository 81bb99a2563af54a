"""The leader's connection to a follower: each order's future ends once, in any order of answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from components.errors import TransferFailed
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.rank_connection import (
    Answer,
    CatchUp,
    RankConnection,
    Write,
    orders,
    read_frame,
    write_frame,
)
from components.wire.layout import of_shard
from tests.components.kv_transfer.nixl_peer import LAYOUT, Pages
from tests.waiting import PATIENCE_S, turns, until

pytestmark = pytest.mark.anyio

WRITE: Final = Write("decode", (0, 16), [1], [2], 1 << 50)
LONG: Final = Write("decode", (0, 16 * 5000), list(range(5000)), list(range(5000)), 1 << 50)
ENOUGH: Final = 100  # long orders, more than socket buffers hold


@dataclass
class Follower:
    """Answers when the test says so."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, error: str = "") -> None:
        frame = await read_frame(self.reader)
        assert frame is not None
        write_frame(self.writer, Answer(orders.decode(frame).number, error=error, num_bytes=7))

    async def end(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def joined(home: Path) -> AsyncIterator[tuple[RankConnection, Follower]]:
    followers: asyncio.Queue[Follower] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await followers.put(Follower(reader, writer))

    path = home / f"socket-{len(list(home.iterdir()))}"
    async with await asyncio.start_unix_server(serve, path):
        connection = await RankConnection.open(1, str(path))
        follower = await followers.get()
        try:
            yield connection, follower
        finally:
            follower.writer.transport.abort()
            await connection.close()
    path.unlink()


async def run(home: Path, order: tuple[str, ...]) -> None:
    async with joined(home) as (connection, follower):
        asked: list[tuple[bool, asyncio.Future[Answer]]] = []
        ended = closed = False

        def ask(order: Write | CatchUp) -> None:
            asked.append((isinstance(order, Write), connection.ask(order)))

        events: dict[str, Callable[[], Awaitable[Any]]] = {
            "answered": lambda: follower.answer() if asked and not ended and not closed else turns(1),
            "end": follower.end,
            "close": connection.close,
        }
        for name in order:
            if name == "write":
                ask(WRITE)
            elif name == "other":
                ask(CatchUp())
            else:
                await events[name]()
                ended, closed = ended or name == "end", closed or name == "close"
            await asyncio.sleep(0.0005)
            if closed:
                assert all(future.done() for _, future in asked)
            elif ended:
                await until(lambda: all(is_write or future.done() for is_write, future in asked))
        await connection.close()
        assert all(future.done() for _, future in asked)
        assert not connection._waiting
        for _, future in asked:
            assert isinstance(future.exception(), TransferFailed | None)


async def test_every_order_ends_once_the_connection_is_closed(tmp_path: Path) -> None:
    for order in permutations(["write", "other", "answered", "end", "close"]):
        try:
            await run(tmp_path, order)
        except Exception as exc:
            exc.add_note(str(order))
            raise


async def test_an_order_that_its_caller_gave_up_is_answered_without_harm(tmp_path: Path) -> None:
    async with joined(tmp_path) as (connection, follower):
        given_up, kept = connection.ask(WRITE), connection.ask(WRITE)
        given_up.cancel()
        await follower.answer("late")
        await follower.answer()
        assert (await asyncio.wait_for(kept, PATIENCE_S)).num_bytes == 7
        connection.ask(WRITE).cancel()
        await connection.close()


async def test_a_write_of_a_follower_that_ends_is_over_only_when_the_connection_is_closed(tmp_path: Path) -> None:
    """Its last bytes may still land. An order that cannot write fails at once."""
    async with joined(tmp_path) as (connection, follower):
        write, other = connection.ask(WRITE), connection.ask(CatchUp())
        await follower.end()
        with pytest.raises(TransferFailed, match="rank 1 of this instance has ended"):
            await asyncio.wait_for(other, PATIENCE_S)
        await turns()
        assert not write.done()
        with pytest.raises(TransferFailed, match="has ended"):
            await connection.ask(WRITE)  # it was never sent
        await connection.close()
        with pytest.raises(TransferFailed, match="has ended"):
            await write


async def test_a_leader_closes_the_connection_of_a_follower_that_reads_nothing(tmp_path: Path) -> None:
    """A leader that left waited for a stopped follower to read its orders, and never killed it."""
    async with joined(tmp_path) as (connection, _):
        writes = [connection.ask(LONG) for _ in range(ENOUGH)]
        await asyncio.wait_for(connection.close(), PATIENCE_S)
        for write in writes:
            with pytest.raises(TransferFailed, match="has ended"):
                await write


async def test_followers_sum_their_pages_at_the_same_time(tmp_path: Path) -> None:
    """The second got its order only after the first had answered."""
    region = Pages(layout=of_shard(LAYOUT, 0, 2), num_pages=1)
    async with joined(tmp_path) as (first, one), joined(tmp_path) as (second, other):
        sums = PageChecksums(region, [first, second]).of_transfer(LAYOUT.page_size)
        total = asyncio.ensure_future(sums.total())
        for follower in (other, one):
            await asyncio.wait_for(follower.answer(), PATIENCE_S)
        assert await asyncio.wait_for(total, PATIENCE_S) == []
