"""Followers of a worker inside this process: transfer ends and connections to the leader as they are, pipes in memory.

A follower is a process of its own: it runs while its leader is stopped, and ends with it.
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
    """One direction: what is written is read a little later."""

    def __init__(self, fabric: Fabric) -> None:
        self.reader = asyncio.StreamReader()
        self._fabric = fabric
        self._sent: deque[bytes] = deque()

    def write(self, data: bytes) -> None:
        """See asyncio.StreamWriter."""
        self._sent.append(data)
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + PIPE_S, self._arrive, context=self._fabric.context)

    @property
    def transport(self) -> "Pipe":
        """See asyncio.StreamWriter."""
        return self

    def abort(self) -> None:
        """See asyncio.WriteTransport."""
        self.close()

    def close(self) -> None:
        """Its end is read after all that was written."""
        self.write(b"")

    async def wait_closed(self) -> None:
        """See asyncio.StreamWriter."""

    def _arrive(self) -> None:
        data = self._sent.popleft()
        if data:
            self.reader.feed_data(data)
        else:
            self.reader.feed_eof()

    def writer(self) -> asyncio.StreamWriter:
        """As its users see it."""
        return cast("asyncio.StreamWriter", self)


class MemoryRankEnd(RankEnd):
    """Its transfer is in memory."""

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
        """And its leader sees the end of its pipe."""
        self.process.state = Running.DEAD
        self._from.close()

    async def end(self) -> None:
        """When its leader leaves."""
        await self.connection.close()
        if not self.process.is_dead:
            await self._task


async def open_ranks(ranks: Sequence[MemoryRank], region: KvRegion, agent: str, pages: int) -> list[RankEndpoint]:
    """Their endpoints."""
    found: list[RankEndpoint] = []
    for i, (rank, memory) in enumerate(zip(ranks, region.followers, strict=True), 1):
        layout = of_shard(region.layout, i, region.layout.shards)
        order = Open("memory", f"{agent}-rank{i}", "", pages, memory.address, region.num_pages, memory.device, layout)
        endpoint = (await rank.connection.ask(order)).endpoint
        assert endpoint is not None, "opening answers with it"
        found.append(endpoint)
    return found
