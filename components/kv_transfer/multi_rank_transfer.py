"""The transfer ends of an instance on several devices."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from components.aio import exception_of
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.backends import kv_opener
from components.kv_transfer.rank_connection import CatchUp, Hasten, Open, RankConnection, Receive
from components.kv_transfer.writes import Writes
from components.wire.instances import KvEndpoint, RankEndpoint
from components.wire.layout import KvRegion, of_shard


class MultiRankTransfer:
    """Implements `KvTransfer`. Its `write_pages` and `write_pieces` are rank 0's: use `Writes` for all ranks."""

    def __init__(self, own: KvTransfer, connections: Sequence[RankConnection], followers: list[RankEndpoint]) -> None:
        self.aux = own.aux
        self.connect, self.disconnect = own.connect, own.disconnect
        self.write_pages, self.write_pieces, self.write_aux = own.write_pages, own.write_pieces, own.write_aux
        self._own = own
        self._connections = connections
        self.endpoint: KvEndpoint = msgspec.structs.replace(own.endpoint, followers=followers)
        self._num_expected = 0

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        future = self._own.expect(notification, slot)
        self._num_expected += 1
        if self._num_expected == 1:
            self._order_all(Receive(on=True))
        future.add_done_callback(self._expected)
        return future

    def poll_often(self, notification: str) -> None:
        self._own.poll_often(notification)
        self._order_all(Hasten())

    async def drain_sockets(self) -> None:
        await self._own.drain_sockets()
        for answer in [connection.ask(CatchUp()) for connection in self._connections]:
            await answer

    def _expected(self, _future: asyncio.Future[None]) -> None:
        self._num_expected -= 1
        if not self._num_expected:
            self._order_all(Receive(on=False))

    def _order_all(self, order: Receive | Hasten) -> None:
        for connection in self._connections:
            connection.ask(order).add_done_callback(exception_of)  # ignored: the instance ends with a follower


@dataclass(frozen=True, slots=True)
class Opened:
    transfer: KvTransfer
    writes: Writes


@asynccontextmanager
async def open_transfer(
    setting: str, region: KvRegion, agent: str, host: str, max_request_pages: int
) -> AsyncIterator[Opened]:
    """Without followers it is the backend's own end."""
    async with kv_opener(setting)(region, agent, host, max_request_pages) as own:
        if not region.followers:
            yield Opened(own, Writes(own))
            return
        connections: list[RankConnection] = []
        try:
            followers: list[RankEndpoint] = []
            for i, rank in enumerate(region.followers, 1):
                connection = await RankConnection.open(i, rank.socket_path)
                connections.append(connection)
                layout = of_shard(region.layout, i, region.layout.shards)
                order = Open(
                    setting,
                    f"{agent}-rank{i}",
                    host,
                    max_request_pages,
                    rank.address,
                    region.num_pages,
                    rank.device,
                    layout,
                )
                endpoint = (await connection.ask(order)).endpoint
                assert endpoint is not None, "opening answers with it"
                followers.append(endpoint)
            transfer = MultiRankTransfer(own, connections, followers)
            yield Opened(transfer, Writes(transfer, connections))
        finally:
            for connection in connections:
                await connection.close()
