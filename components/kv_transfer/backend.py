"""What a transfer backend does: one-sided writes of pages into another process's pool, and a word when they have landed."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from components.errors import IncompatibleLayout
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.layout import KvLayout
from components.kv_transfer.pieces import Pieces
from components.wire.instances import KvEndpoint


class PageRegion(Protocol):
    """The page pool of this process; the engine's `KvRegion` is one."""

    @property
    def address(self) -> int:
        """Of page 0."""

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""

    @property
    def layout(self) -> KvLayout:
        """Of a page."""

    @property
    def device(self) -> str:
        """As torch names it: cpu, cuda:0."""


class KvTransfer(Protocol):
    """One process's end. Every method is called on the event loop; whatever blocks happens on the backend's own thread."""

    @property
    def endpoint(self) -> KvEndpoint:
        """What the other side needs to write here; goes into this instance's etcd record."""

    @property
    def aux(self) -> AuxBuffer:
        """This process's aux slots."""

    async def connect(self, peer: KvEndpoint) -> None:
        """Set up once what writing to `peer` needs. Raises: IncompatibleLayout, TransferFailed."""

    async def disconnect(self, agent: str) -> None:
        """Forget a peer that is gone: nothing is written to it any more."""

    def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int]) -> Awaitable[int]:
        """Copy pages `source` of ours into pages `target` of the peer, whose pages are as large as ours.

        Gives, when they have landed, how many bytes that were: a coroutine, or a future that may be done already. A page is
        one contiguous piece on both sides.
        Raises: TransferFailed, when no byte of it is in flight any more but not all have landed.
        """

    def write_pieces(self, agent: str, pieces: Pieces) -> Awaitable[int]:
        """Copy `pieces` of our pool into the peer's, whose pages have another size; otherwise as `write_pages`.

        At least one piece, and not a byte beside them: an earlier write may have filled the other rows of the same page.
        There are hundreds for each page, each of a kilobyte or a few, and no two writes have the same: what a backend
        prepares for whole pages does not help here.
        """

    def write_aux(self, agent: str, source_slot: int, target_slot: int, notification: str) -> Awaitable[object]:
        """Copy one aux slot, then tell the peer `notification`. Raises: TransferFailed."""

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        """A future that completes when a peer has written this aux slot and said exactly this text.

        From this call on, neither is missed.

        Keep it until nothing is written here any more: writes make progress only while something is expected.
        """

    def hasten(self, notification: str) -> None:
        """The peer is about to write its last pages before this notification: a backend that looks for it should look often.

        A hint, which may be lost, and may come for what nobody expects any more.
        """


class OpenTransfer(Protocol):
    """What a backend gives under its name: see docs/writing-a-kv-transfer-backend.md."""

    def __call__(
        self, region: PageRegion, agent_name: str, *, plugin: str, host: str, max_request_pages: int
    ) -> AbstractAsyncContextManager[KvTransfer]:
        """This process's end, while inside; the region outlives it.

        Args:
            region: the page pool.
            agent_name: unique per process; peers name us by it.
            plugin: what followed a slash in the name, as UCX in nixl/UCX; else empty.
            host: the address of this machine that peers reach.
            max_request_pages: aux slots have room for a checksum for each of so many pages.
        Raises: BackendUnavailable, saying what is missing.
        """


def endpoint_of(backend: str, agent: str, agent_metadata: str, region: PageRegion, aux: AuxBuffer) -> KvEndpoint:
    """What the other side needs to write into `region` and `aux` of this process."""
    return KvEndpoint(
        backend=backend,
        agent=agent,
        agent_metadata=agent_metadata,
        base_address=region.address,
        num_pages=region.num_pages,
        device=region.device,
        aux_address=aux.address,
        aux_slots=aux.num_slots,
        aux_slot_bytes=aux.slot_bytes,
        layout=region.layout,
    )


def check_same_backend(ours: str, theirs: str) -> None:
    """Raises: IncompatibleLayout, naming both: backends do not speak with each other."""
    if ours != theirs:
        raise IncompatibleLayout(
            f"prefill and decode must move KV the same way (--kv-transfer: {ours} here, {theirs} there)"
        )
