"""The Mooncake backend: host memory over TCP, without a metadata server.

One engine listens and holds the pool; each peer has another for writes. A write ends at the peer's acknowledgement, so no aux
slot or doorbell overtakes pages.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from components.errors import BackendUnavailable, MeshError, TransferFailed
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.backend import check_same_backend, endpoint_of
from components.kv_transfer.doorbell import DoorbellClients, DoorbellServer
from components.kv_transfer.mooncake_api import start_engine
from components.kv_transfer.mooncake_peer import MooncakePeer, Piece
from components.kv_transfer.pieces import Pieces, runs
from components.startup import WrongSettings
from components.wire.doorbell import Ring
from components.wire.instances import KvEndpoint
from components.wire.layout import KvRegion, check_compatible


class MooncakeTransfer:
    def __init__(self, region: KvRegion, agent_name: str, host: str, max_request_pages: int) -> None:
        self.aux = AuxBuffer(max_checksums=max_request_pages)
        self.doorbell = DoorbellServer(agent_name, host, None)
        self._region = region
        self._name = agent_name
        self._host = host
        self._clients = DoorbellClients()
        self._peers: dict[str, MooncakePeer] = {}
        self._engine: Any = None
        self._segment = ""  # this engine's name for peers

    @property
    def endpoint(self) -> KvEndpoint:
        assert self._segment, "start() first"
        return endpoint_of("mooncake", self._name, f"{self._segment},{self.doorbell.address}", self._region, self.aux)

    async def start(self) -> None:
        self._segment = await asyncio.to_thread(self._listen)

    async def stop(self) -> None:
        await asyncio.gather(*(self.disconnect(agent) for agent in list(self._peers)))
        await self._clients.disconnect_all()
        await asyncio.to_thread(self._close)

    async def connect(self, peer: KvEndpoint) -> None:
        check_same_backend("mooncake", peer.backend)
        check_compatible(self._region.layout, peer.layout)
        segment, _, doorbell = peer.agent_metadata.partition(",")
        await self._clients.connect(peer.agent, doorbell)  # first, because it answers fast and identifies the process
        known = self._peers.get(peer.agent) or MooncakePeer(peer, segment, self._host)
        self._peers[peer.agent] = known
        try:
            await known.opened()
        except MeshError:  # else the peer would stay unusable
            if self._peers.get(peer.agent) is known:
                await self.disconnect(peer.agent)
            raise

    async def disconnect(self, agent: str) -> None:
        peer = self._peers.pop(agent, None)
        await self._clients.disconnect(agent)
        if peer is not None:
            await peer.stop()

    async def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int) -> int:
        peer = self._peer(agent)
        size, ours, theirs = self._region.layout.page_bytes, self._region.address, peer.endpoint.base_address
        pieces = [
            Piece(ours + run.source * size, theirs + run.target * size, run.count * size)
            for run in runs(source, target, self._region.num_pages, peer.endpoint.num_pages)
        ]
        return await peer.write(pieces, deadline_unix_ms)

    async def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> int:
        peer = self._peer(agent)
        ours, theirs = self._region.address, peer.endpoint.base_address
        copies = zip(pieces.source.tolist(), pieces.target.tolist(), pieces.length.tolist(), strict=True)
        cut = [Piece(ours + source, theirs + target, size) for source, target, size in copies]
        return await peer.write(cut, deadline_unix_ms)

    async def write_aux(
        self, agent: str, source_slot: int, target_slot: int, notification: str, deadline_unix_ms: int
    ) -> None:
        peer, client = self._peer(agent), self._clients.to(agent)
        source = self.aux.address + source_slot * self.aux.slot_bytes
        target = peer.endpoint.aux_address + target_slot * peer.endpoint.aux_slot_bytes
        size = min(self.aux.slot_bytes, peer.endpoint.aux_slot_bytes)  # a longer slot's rest stays unused
        await peer.write([Piece(source, target, size)], deadline_unix_ms)
        await client.ring(Ring(notification=notification))

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        return self.doorbell.expect(notification)

    def poll_often(self, notification: str) -> None:
        pass

    async def drain_sockets(self) -> None:
        pass

    def _peer(self, agent: str) -> MooncakePeer:
        peer = self._peers.get(agent)
        if peer is None:
            raise TransferFailed(f"no connection to {agent}")
        return peer

    def _listen(self) -> str:
        self._engine = start_engine(self._host)
        region, aux = self._region, self.aux
        for address, size in (
            (region.address, region.num_pages * region.layout.page_bytes),
            (aux.address, aux.num_bytes),
        ):
            if self._engine.register_memory(address, size):
                raise BackendUnavailable(f"Mooncake cannot register {size} bytes of memory")
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def _close(self) -> None:
        self._engine = None


@asynccontextmanager
async def open_mooncake(
    region: KvRegion, agent_name: str, *, plugin: str, host: str, max_request_pages: int
) -> AsyncIterator[MooncakeTransfer]:
    if plugin:
        raise WrongSettings(
            f"setting kv_transfer: mooncake moves KV over TCP and has no plugin {plugin!r}: use mooncake"
        )
    if region.device != "cpu":
        raise WrongSettings(f"setting kv_transfer: mooncake moves KV in host memory, not on {region.device}: use nixl")
    transfer = MooncakeTransfer(region, agent_name, host, max_request_pages)
    try:
        await transfer.start()
        async with transfer.doorbell.listening():
            yield transfer
    finally:
        await transfer.stop()
