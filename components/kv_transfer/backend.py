"""The interface of a transfer backend: one-sided writes into another process's pool."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from components.errors import DeadlineExceeded, IncompatibleLayout
from components.wire.instances import KvEndpoint
from components.wire.layout import KvRegion

if TYPE_CHECKING:  # services.local and services.inspect start without numpy
    from components.kv_transfer.aux import AuxBuffer
    from components.kv_transfer.pieces import Pieces


class KvTransfer(Protocol):
    """One process's end of all transfers. Call it on the event loop; blocking work runs elsewhere.

    `deadline_unix_ms` of a write is that of the peer's offer, by our clock. After it the peer may reuse pages and slot, so a
    backend calls `check_deadline` just before each post.
    """

    @property
    def endpoint(self) -> KvEndpoint:
        """What peers need to connect; part of this instance's record in etcd."""

    @property
    def aux(self) -> "AuxBuffer":
        pass

    async def connect(self, peer: KvEndpoint) -> None:
        """Raises: IncompatibleLayout, TransferFailed."""

    async def disconnect(self, agent: str) -> None:
        pass

    def write_pages(
        self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int
    ) -> Awaitable[int]:
        """Copy our pages `source` into the peer's pages `target`, which have the same size.

        Shield the call: a cancelled caller does not learn when the write ends.
        Returns: an awaitable, perhaps done already, of the bytes that have landed.
        Raises: TransferFailed or DeadlineExceeded, when no byte is in flight any more but not all have landed.
        """

    def write_pieces(self, agent: str, pieces: "Pieces", deadline_unix_ms: int) -> Awaitable[int]:
        """Copy one or more pieces into a pool with another page size. Other bytes do not change.

        Returns: as `write_pages`.
        """

    def write_aux(
        self, agent: str, source_slot: int, target_slot: int, notification: str, deadline_unix_ms: int
    ) -> Awaitable[object]:
        """Copy one aux slot, which the peer identifies by `notification`.

        Raises: TransferFailed, DeadlineExceeded.
        """

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        """Return a future that completes when a peer has written this aux slot for `notification`.

        Keep it until all writes have ended, because they make progress only while a slot is expected.
        """

    def poll_often(self, notification: str) -> None:
        """The peer will soon write its last pages. This hint may be lost or late."""

    async def drain_sockets(self) -> None:
        """Return when all bytes that have reached this machine are in the pool.

        After that, no byte of an ended write can arrive. TCP keeps bytes in a socket until this process reads it.
        """


class OpenTransfer(Protocol):
    def __call__(
        self, region: KvRegion, agent_name: str, *, plugin: str, host: str, max_request_pages: int
    ) -> AbstractAsyncContextManager[KvTransfer]:
        """Open this process's end; `region` must outlive it.

        Args:
            agent_name: unique per process; peers identify us by it.
            plugin: the part of the setting after a slash, such as UCX in nixl/UCX; else empty.
            host: this machine's address for peers.
            max_request_pages: number of checksums that an aux slot has room for.
        Raises: BackendUnavailable.
        """


def endpoint_of(backend: str, agent: str, agent_metadata: str, region: KvRegion, aux: "AuxBuffer") -> KvEndpoint:
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


def check_deadline(deadline_unix_ms: int) -> None:
    """Check an offer's deadline just before each post.

    A timer is not enough: a process that was stopped and resumed may post before the timer's callback runs.
    Raises: DeadlineExceeded.
    """
    if time.time() * 1000 >= deadline_unix_ms:
        raise DeadlineExceeded("the deadline of the offer passed before the write")


def check_same_backend(ours: str, theirs: str) -> None:
    if ours != theirs:
        raise IncompatibleLayout(
            f"prefill and decode must use the same KV transfer backend (--kv-transfer: {ours} here, {theirs} there)"
        )
