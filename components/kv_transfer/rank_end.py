"""A follower's transfer end, on another thread than the computation."""

import asyncio
import os
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from components.errors import InvariantBroken, MeshError
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.backends import kv_opener
from components.kv_transfer.checksum import TransferChecksums, head_groups
from components.kv_transfer.page_reader import open_reader
from components.kv_transfer.rank_connection import (
    Answer,
    CatchUp,
    Connect,
    Disconnect,
    Hasten,
    Open,
    Order,
    Receive,
    Sum,
    Write,
    orders,
    rank_endpoint,
    read_frame,
    write_frame,
)
from components.kv_transfer.writes import Copy, connect_ranks, write_ranks
from components.wire.instances import KvEndpoint
from components.wire.layout import KvRegion

PLACEHOLDER_NOTIFICATION = "kvmesh-leader"  # no peer sends it


def serve_rank(path: Path) -> None:
    """Execute a leader's orders, until the process ends."""
    listening = threading.Event()

    def run() -> None:
        try:
            asyncio.run(_serve(path, listening))
        finally:
            listening.set()  # even after an error: the leader then cannot connect

    threading.Thread(target=run, name="transfers", daemon=True).start()
    listening.wait()


async def _serve(path: Path, listening: threading.Event) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with AsyncExitStack() as stack:
                await execute_orders(RankEnd(stack), reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async with await asyncio.start_unix_server(serve, path) as server:
        listening.set()
        await server.serve_forever()


async def execute_orders(end: "RankEnd", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.TaskGroup() as tasks:
        while (frame := await read_frame(reader)) is not None:
            numbered = orders.decode(frame)
            tasks.create_task(_answered(end, numbered.number, numbered.order, writer))


async def _answered(end: "RankEnd", number: int, order: Order, writer: asyncio.StreamWriter) -> None:
    try:
        answer = await end.execute(number, order)
    except MeshError as exc:
        answer = Answer(number, error=exc.message)
    except Exception as exc:  # noqa: BLE001 - the edge of one order: the leader fails the transfer
        answer = Answer(number, error=f"{type(exc).__name__}: {exc}")
    write_frame(writer, answer)


class RankEnd:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._transfer: KvTransfer | None = None
        self._region: KvRegion | None = None
        self._peers: dict[str, KvEndpoint] = {}  # by the agent of the first rank
        self._receiving: asyncio.Future[None] | None = None

    async def execute(self, number: int, order: Order) -> Answer:
        """Raises: MeshError."""
        if isinstance(order, Open):
            return await self._open(number, order)
        transfer = self._transfer
        if transfer is None:
            raise InvariantBroken("this end is not open")
        match order:
            case Connect(peer):
                await connect_ranks(transfer, peer)
                self._peers[peer.agent] = peer
            case Disconnect(agents):
                for agent in agents:
                    self._peers.pop(agent, None)
                    await transfer.disconnect(agent)
            case Write(agent, tokens, source, target, deadline_unix_ms):
                copy = Copy(range(*tokens), source, target)
                moved = await write_ranks(transfer, self._peers[agent], copy, deadline_unix_ms)
                return Answer(number, num_bytes=moved)
            case Sum(pages, tokens, peer_page_size):
                region = self._region
                assert region is not None, "the end is open"
                sums = TransferChecksums(
                    open_reader(region), region.layout.page_size, peer_page_size, head_groups(region.layout)
                )
                await sums.add(pages, range(*tokens))
                return Answer(number, sums=sums.groups)
            case Receive(on):
                self._receive(transfer, on=on)
            case Hasten():
                transfer.poll_often(PLACEHOLDER_NOTIFICATION)
            case CatchUp():
                await transfer.drain_sockets()
        return Answer(number)

    async def _open(self, number: int, order: Open) -> Answer:
        region = KvRegion(order.address, order.num_pages, order.layout, order.device)
        self._region = region
        opening = kv_opener(order.setting)(region, order.agent, order.host, order.max_request_pages)
        self._transfer = await self._stack.enter_async_context(opening)
        return Answer(number, endpoint=rank_endpoint(os.getpid(), self._transfer.endpoint))

    def _receive(self, transfer: KvTransfer, *, on: bool) -> None:
        """Expect a slot that is never written, because a backend makes progress only while a slot is expected."""
        if on and self._receiving is None:
            slot = transfer.aux.take()
            self._receiving = transfer.expect(PLACEHOLDER_NOTIFICATION, slot)
            self._receiving.add_done_callback(lambda _: transfer.aux.give_back(slot))
        elif not on and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
