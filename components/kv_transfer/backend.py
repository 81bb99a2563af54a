"""The interface of a transfer backend: one-sided writes of pages into another process's pool, and a notice when
they have landed.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from components.errors import IncompatibleLayout
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.pieces import Pieces
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout


class PageRegion(Protocol):
    """This process's page pool; the engine's `KvRegion` implements it."""

    @property
    def address(self) -> int:
        """of page 0"""

    @property
    def num_pages(self) -> int:
        pass

    @property
    def layout(self) -> KvLayout:
        pass

    @property
    def device(self) -> str:
        """As torch names it: cpu, cuda:0."""


class KvTransfer(Protocol):
    """One process's end. Methods are called on the event loop; blocking work runs on the backend's thread."""

    @property
    def endpoint(self) -> KvEndpoint:
        """Part of this instance's record in etcd."""

    @property
    def aux(self) -> AuxBuffer:
        pass

    async def connect(self, peer: KvEndpoint) -> None:
        """Prepare writes to `peer`. Raises: IncompatibleLayout, TransferFailed."""

    async def disconnect(self, agent: str) -> None:
        pass

    def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int]) -> Awaitable[int]:
        """Copy our pages `source` into the peer's pages `target`, of equal size.

        Returns: an awaitable of the bytes that have landed, which may be done already.
        Raises: TransferFailed, when no byte is in flight any more but not all have landed.
        """

    def write_pieces(self, agent: str, pieces: Pieces) -> Awaitable[int]:
        """Copy `pieces` into a pool with another page size; otherwise as `write_pages`.

        There is at least one. Bytes beside them stay: an earlier write may have filled other rows of the page.
        There are hundreds of pieces per page, a few kilobytes each, different in each write, so prepared
        descriptors of whole pages do not help.
        """

    def write_aux(self, agent: str, source_slot: int, target_slot: int, notification: str) -> Awaitable[object]:
        """Copy one aux slot, then notify the peer with `notification`. Raises: TransferFailed."""

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        """A future that completes when a peer has written this aux slot with exactly this notification, from now
        on.

        Keep it until nothing is written here any more: writes make progress only while something is expected.
        """

    def hasten(self, notification: str) -> None:
        """The peer is about to write the last pages before this notification, so poll often.

        A hint that may be lost, or come for a notification that is not expected any more.
        """


class OpenTransfer(Protocol):
    def __call__(
        self, region: PageRegion, agent_name: str, *, plugin: str, host: str, max_request_pages: int
    ) -> AbstractAsyncContextManager[KvTransfer]:
        """This process's end. `region` outlives it.

        Args:
            region: the page pool.
            agent_name: unique per process; peers name us by it.
            plugin: what follows a slash in the name, as UCX in nixl/UCX; else empty.
            host: this machine's address for peers.
            max_request_pages: number of checksums that an aux slot has room for.
        Raises: BackendUnavailable.
        """


def endpoint_of(backend: str, agent: str, agent_metadata: str, region: PageRegion, aux: AuxBuffer) -> KvEndpoint:
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
    """Raises: IncompatibleLayout, naming both backends."""
    if ours != theirs:
        raise IncompatibleLayout(
            f"prefill and decode must move KV the same way (--kv-transfer: {ours} here, {theirs} there)"
        )
