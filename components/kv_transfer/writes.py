"""Write tokens from the ranks of this instance into those of a peer.

Rank 0's end is in this process; a `RankConnection` reaches a follower's.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import msgspec

from components.aio import ended
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.pieces import cut, shared_heads
from components.kv_transfer.rank_connection import Connect, Disconnect, RankConnection, Write
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout, of_shard


def of_rank(peer: KvEndpoint, rank: int) -> KvEndpoint:
    layout = of_shard(peer.layout, rank, peer.layout.shards)
    if rank == 0:
        return msgspec.structs.replace(peer, followers=[])
    one = peer.followers[rank - 1]
    return msgspec.structs.replace(
        peer,
        agent=one.agent,
        agent_metadata=one.agent_metadata,
        base_address=one.base_address,
        device=one.device,
        aux_address=one.aux_address,
        layout=layout,
        followers=[],
    )


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens of two block tables, both of which begin at token 0."""

    tokens: range
    source: Sequence[int]
    target: Sequence[int]


def targets(ours: KvLayout, peer: KvEndpoint) -> list[KvEndpoint]:
    """The ranks of the peer into which our rank writes."""
    ranks = (of_rank(peer, rank) for rank in range(1 + len(peer.followers)))
    return [rank for rank in ranks if shared_heads(ours, rank.layout)]


def write_rank(transfer: KvTransfer, to: KvEndpoint, copy: Copy, deadline_unix_ms: int) -> Awaitable[int]:
    """Write the heads that both ranks share."""
    ours, theirs, tokens = transfer.endpoint.layout, to.layout, copy.tokens
    if ours.page_size != theirs.page_size:
        return transfer.write_pieces(to.agent, cut(ours, theirs, tokens, copy.source, copy.target), deadline_unix_ms)
    # With the unused rows of the last page, each page is a single piece.
    pages = slice(tokens.start // ours.page_size, ours.pages_for(tokens.stop))
    if ours.heads == theirs.heads:
        return transfer.write_pages(to.agent, copy.source[pages], copy.target[pages], deadline_unix_ms)
    whole = range(pages.start * ours.page_size, pages.stop * ours.page_size)
    return transfer.write_pieces(to.agent, cut(ours, theirs, whole, copy.source, copy.target), deadline_unix_ms)


async def connect_ranks(transfer: KvTransfer, peer: KvEndpoint) -> None:
    """Raises: IncompatibleLayout, TransferFailed."""
    for rank in targets(transfer.endpoint.layout, peer):
        await transfer.connect(rank)


async def write_ranks(transfer: KvTransfer, peer: KvEndpoint, copy: Copy, deadline_unix_ms: int) -> int:
    ranks = targets(transfer.endpoint.layout, peer)
    return await all_ended([write_rank(transfer, to, copy, deadline_unix_ms) for to in ranks])


async def all_ended(writes: Sequence[Awaitable[int]]) -> int:
    """Wait for all writes, even if one fails or the caller is cancelled, so no byte is in flight. Returns: the sum."""
    running = [asyncio.ensure_future(write) for write in writes]
    await ended(asyncio.gather(*running, return_exceptions=True))
    return sum(write.result() for write in running)


class Writes:
    def __init__(self, transfer: KvTransfer, connections: Sequence[RankConnection] = ()) -> None:
        self._transfer = transfer  # of rank 0
        self.connections = connections
        self._agents: dict[str, list[str]] = {}  # of a peer's ranks, by the agent of its first

    async def connect(self, peer: KvEndpoint) -> None:
        """Raises: IncompatibleLayout, TransferFailed."""
        self._agents[peer.agent] = [peer.agent, *(rank.agent for rank in peer.followers)]
        for connection in self.connections:
            await connection.ask(Connect(peer))
        await connect_ranks(self._transfer, peer)

    async def disconnect(self, agent: str) -> None:
        agents = self._agents.pop(agent, [agent])
        for connection in self.connections:
            await connection.ask(Disconnect(agents))
        for one in agents:
            await self._transfer.disconnect(one)

    def write(self, peer: KvEndpoint, copy: Copy, deadline_unix_ms: int) -> Awaitable[int]:
        """Copy tokens. Returns: as `KvTransfer.write_pages`."""
        if not self.connections and not peer.followers:
            return write_rank(self._transfer, peer, copy, deadline_unix_ms)
        tokens = (copy.tokens.start, copy.tokens.stop)
        order = Write(peer.agent, tokens, list(copy.source), list(copy.target), deadline_unix_ms)
        own = write_ranks(self._transfer, peer, copy, deadline_unix_ms)
        return all_ended([own, *(connection.moved(order) for connection in self.connections)])
