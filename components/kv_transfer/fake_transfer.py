"""The fake backend sends aux slots by doorbell but no KV, to measure the protocol.

Each write is a round trip, so a write to a dead peer fails as with other backends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.backend import check_deadline, check_same_backend, endpoint_of
from components.kv_transfer.doorbell import DoorbellClients, DoorbellServer
from components.kv_transfer.pieces import Pieces, runs
from components.startup import WrongSettings
from components.wire.doorbell import Ring
from components.wire.instances import KvEndpoint
from components.wire.layout import KvRegion, check_compatible

log = logging.getLogger(__name__)


class FakeKvTransfer:
    def __init__(self, region: KvRegion, agent_name: str, host: str, max_request_pages: int) -> None:
        self.aux = AuxBuffer(max_checksums=max_request_pages)
        self.doorbell = DoorbellServer(agent_name, host, self.aux.put)
        self._region = region
        self._name = agent_name
        self._clients = DoorbellClients()
        self._num_pages: dict[str, int] = {}  # of each peer's pool

    @property
    def endpoint(self) -> KvEndpoint:
        return endpoint_of("fake", self._name, self.doorbell.address, self._region, self.aux)

    async def connect(self, peer: KvEndpoint) -> None:
        check_same_backend("fake", peer.backend)
        check_compatible(self._region.layout, peer.layout)
        await self._clients.connect(peer.agent, peer.agent_metadata)
        self._num_pages[peer.agent] = peer.num_pages

    async def disconnect(self, agent: str) -> None:
        self._num_pages.pop(agent, None)
        await self._clients.disconnect(agent)

    async def stop(self) -> None:
        await self._clients.disconnect_all()

    async def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int) -> int:
        client = self._clients.to(agent)
        runs(source, target, self._region.num_pages, self._num_pages[agent])  # checks that the pages exist
        check_deadline(deadline_unix_ms)
        await client.ring(Ring())
        return 0

    async def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> int:
        client = self._clients.to(agent)
        check_deadline(deadline_unix_ms)
        await client.ring(Ring())
        return 0

    async def write_aux(
        self, agent: str, source_slot: int, target_slot: int, notification: str, deadline_unix_ms: int
    ) -> None:
        client, record = self._clients.to(agent), self.aux.raw(source_slot)
        check_deadline(deadline_unix_ms)
        await client.ring(Ring(notification=notification, aux_slot=target_slot, aux=record))

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        return self.doorbell.expect(notification)

    def poll_often(self, notification: str) -> None:
        pass

    async def drain_sockets(self) -> None:
        pass


@asynccontextmanager
async def open_fake(
    region: KvRegion, agent_name: str, *, plugin: str, host: str, max_request_pages: int
) -> AsyncIterator[FakeKvTransfer]:
    if plugin:
        raise WrongSettings(f"setting kv_transfer: the fake KV transfer has no plugin {plugin!r}: use fake")
    log.warning("KV transfer is fake: no KV is moved, and text generated after a transfer is meaningless")
    transfer = FakeKvTransfer(region, agent_name, host, max_request_pages)
    async with transfer.doorbell.listening():
        try:
            yield transfer
        finally:
            await transfer.stop()
