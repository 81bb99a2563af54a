"""Followers of a worker inside this process: the product's code for transfers and orders, over pipes in memory.

A follower keeps running while its leader is stopped, and ends with it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final, cast

from components.kv_transfer.rank_connection import Answer, Open, RankConnection, rank_endpoint
from components.kv_transfer.rank_end import RankEnd, execute_orders
from components.wire.instances import RankEndpoint
from components.wire.layout import KvRegion, of_shard
from tests.faults.memory_transfer import Fabric, MemoryTransfer
from tests.faults.virtual_loop import Process, Running

PIPE_S: Final = 0.0002
PID: Final = 1


class Pipe:
    """One direction, with the parts of asyncio.StreamWriter and its transport that are used."""

    def __init__(self, fabric: Fabric) -> None:
        self.reader = asyncio.StreamReader()
        self._fabric = fabric
        self._sent: deque[bytes] = deque()

    def write(self, data: bytes) -> None:
        self._sent.append(data)
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + PIPE_S, self._arrive, context=self._fabric.context)

    @property
    def transport(self) -> "Pipe":
        return self

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        self.write(b"")

    async def wait_closed(self) -> None:
        """There is no socket to close."""

    def _arrive(self) -> None:
        data = self._sent.popleft()
        if data:
            self.reader.feed_data(data)
        else:
            self.reader.feed_eof()

    def writer(self) -> asyncio.StreamWriter:
        return cast("asyncio.StreamWriter", self)


class MemoryRankEnd(RankEnd):
    def __init__(self, stack: AsyncExitStack, make: Callable[[Open], MemoryTransfer]) -> None:
        super().__init__(stack)
        self._make = make

    async def _open(self, number: int, order: Open) -> Answer:
        self._transfer = transfer = self._make(order)
        self._region = KvRegion(order.address, order.num_pages, order.layout, order.device)
        self._stack.callback(transfer.close)
        return Answer(number, endpoint=rank_endpoint(PID, transfer.endpoint))


class MemoryRank:
    """One follower."""

    def __init__(self, rank: int, leader: str, fabric: Fabric, holder: Callable[[int], object | None]) -> None:
        self.process = Process(f"{leader}-rank{rank}")
        self._fabric = fabric
        self._holder = holder
        self._to, self._from = Pipe(fabric), Pipe(fabric)
        self.connection = RankConnection(rank, self._from.reader, self._to.writer())
        self._task = self.process.spawn(self._serve(), "transfers")

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            await execute_orders(MemoryRankEnd(stack, self._make), self._to.reader, self._from.writer())
        self._from.close()

    def _make(self, order: Open) -> MemoryTransfer:
        region = KvRegion(order.address, order.num_pages, order.layout, order.device)
        pages = order.max_request_pages
        return MemoryTransfer(self._fabric, region, pages, order.agent, self.process, self._holder, seals=True)

    def kill(self) -> None:
        self.process.state = Running.DEAD
        self._from.close()

    async def end(self) -> None:
        await self.connection.close()
        if not self.process.is_dead:
            await self._task


async def open_ranks(ranks: Sequence[MemoryRank], region: KvRegion, agent: str, pages: int) -> list[RankEndpoint]:
    found: list[RankEndpoint] = []
    for i, (rank, memory) in enumerate(zip(ranks, region.followers, strict=True), 1):
        layout = of_shard(region.layout, i, region.layout.shards)
        order = Open("memory", f"{agent}-rank{i}", "", pages, memory.address, region.num_pages, memory.device, layout)
        endpoint = (await rank.connection.ask(order)).endpoint
        assert endpoint is not None, "opening answers with it"
        found.append(endpoint)
    return found
