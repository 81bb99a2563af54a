"""A transfer backend that records writes; the test ends them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from components.errors import MeshError
from components.kv_transfer.aux import AuxBuffer, AuxRecord, slot_bytes
from components.kv_transfer.backend import check_deadline
from components.kv_transfer.pieces import Pieces
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout, check_compatible

LAYOUT = KvLayout(model="m", dtype="float32", page_size=4, layers=1, kv_heads=1, head_dim=2)


def endpoint(
    agent: str = "decode-d", num_pages: int = 100, aux_slots: int = 8, layout: KvLayout = LAYOUT
) -> KvEndpoint:
    return KvEndpoint(
        backend="fake",
        agent=agent,
        agent_metadata="",
        base_address=0,
        num_pages=num_pages,
        device="cpu",
        aux_address=0,
        aux_slots=aux_slots,
        aux_slot_bytes=slot_bytes(0),
        layout=layout,
    )


@dataclass
class FakeTransfer:
    """A `KvTransfer`. A cleared `gate` keeps writes in flight. `peer`: the other end."""

    endpoint: KvEndpoint = field(default_factory=endpoint)
    aux: AuxBuffer = field(default_factory=lambda: AuxBuffer(8))
    peer: "FakeTransfer | None" = None
    failure: MeshError | None = None  # how writes end
    writes: list[tuple[list[int], list[int]]] = field(default_factory=list)  # pages (ours, the peer's), as posted
    pieces: list[Pieces] = field(default_factory=list)  # as posted
    in_flight: int = 0
    connected: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    expected: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    hastened: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def connect(self, peer: KvEndpoint) -> None:
        check_compatible(self.endpoint.layout, peer.layout)
        self.connected.append(peer.agent)

    async def disconnect(self, agent: str) -> None:
        self.forgotten.append(agent)

    async def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int) -> int:
        assert agent in self.connected
        assert len(source) == len(target) > 0
        check_deadline(deadline_unix_ms)
        self.writes.append((list(source), list(target)))
        await self._flight()
        return len(source) * LAYOUT.page_bytes

    async def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> int:
        assert agent in self.connected
        assert len(pieces) > 0
        check_deadline(deadline_unix_ms)
        self.pieces.append(pieces)
        await self._flight()
        return int(pieces.length.sum())

    async def write_aux(
        self, agent: str, source_slot: int, target_slot: int, notification: str, deadline_unix_ms: int
    ) -> None:
        record = self.aux.read(source_slot)
        check_deadline(deadline_unix_ms)
        await self._flight()
        if self.peer is not None:
            self.peer.land(notification, target_slot, record)

    def land(self, notification: str, slot: int, record: AuxRecord) -> None:
        """Receive a peer's last write."""
        self.aux.write(slot, record)
        future = self.expected.pop(notification, None)
        if future is not None and not future.done():
            future.set_result(None)

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self.expected[notification] = future
        future.add_done_callback(lambda _: self.expected.pop(notification, None))
        return future

    def poll_often(self, notification: str) -> None:
        self.hastened.append(notification)

    async def drain_sockets(self) -> None:
        """There are no sockets."""

    async def _flight(self) -> None:
        self.in_flight += 1
        await self.gate.wait()  # cancelling the caller does not end the write
        self.in_flight -= 1
        if self.failure is not None:
            raise self.failure
