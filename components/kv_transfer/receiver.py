"""Decode's side of one transfer: a slot and pages that another process may write into, until it has said that it will not."""

import asyncio
from enum import StrEnum, auto
from typing import Final

from components.aio import Failure
from components.errors import KvCorrupt, TransferFailed
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import PageChecksums, Sent
from components.lifecycle import Lifecycle
from components.telemetry.spans import tracer


class ReceiveState(StrEnum):
    """Life of one KV transfer as decode sees it; one transfer per bootstrap room."""

    BOOTSTRAPPING = auto()  # prefill was asked for a room; no page of ours is known to anyone
    TRANSFERRING = auto()  # pages are offered: prefill may write into them at any moment
    DONE = auto()  # every page landed; the request may decode
    PINNED = auto()  # it failed after the offer: pages stay until prefill is quiet, or gone
    CLOSED = auto()  # it failed, and nothing can write any more


NAMED: Final = 16  # pages that an error names, at most

S = ReceiveState
NEXT: Final = {
    S.BOOTSTRAPPING: {S.TRANSFERRING, S.CLOSED},
    S.TRANSFERRING: {S.DONE, S.PINNED},
    S.PINNED: {S.CLOSED},
}


class Receiver:
    """Holds one aux slot from start to end, and knows whether the pages are exposed."""

    def __init__(self, transfer: KvTransfer, request_id: str, checksums: PageChecksums | None = None) -> None:
        self.lifecycle = Lifecycle(f"receive {request_id}", NEXT, S.BOOTSTRAPPING)
        self._transfer = transfer
        self._checksums = checksums  # when what lands is to be verified
        self.slot = transfer.aux.take()
        self._landed: asyncio.Future[None] | None = None
        self.failure = Failure()

    def offer(self, room: str) -> None:
        """From here on prefill may write; called before the offer leaves."""
        self.lifecycle.advance(S.TRANSFERRING)
        self._landed = self._transfer.expect(room, self.slot)

    async def landed(self, stamp: int, num_pages: int, sent: Sent | None = None) -> AuxRecord:
        """Wait for everything, and believe it only when the aux slot carries this room's stamp and page count.

        Args:
            stamp: the room's.
            num_pages: of the whole prompt.
            sent: what prefill writes; verified when this receiver has checksums.
        Raises: TransferFailed, of which KvCorrupt is one.
        """
        assert self._landed is not None, "offer() comes first"
        await asyncio.shield(self._landed)  # prefill's write needs us to poll, also when nobody waits for it any more
        record = self._transfer.aux.read(self.slot)
        if (record.stamp, record.num_pages) != (stamp, num_pages):
            raise TransferFailed(
                f"the aux slot says stamp {record.stamp}, {record.num_pages} pages; expected {stamp}, {num_pages}"
            )
        if self._checksums is not None:
            assert sent is not None, "nobody says what to verify"
            with tracer.start_as_current_span("decode.verify"):
                await _verify(record, sent, self._checksums)
        self.lifecycle.advance(S.DONE)
        self._transfer.aux.give_back(self.slot)
        return record

    def abandon(self) -> bool:
        """Give up; whether pages and slot must stay until `close` because prefill may still write."""
        if self.lifecycle.state is S.TRANSFERRING:
            self.lifecycle.advance(S.PINNED)
            return True
        if self.lifecycle.state is S.BOOTSTRAPPING:
            self.lifecycle.advance(S.CLOSED)
            self._transfer.aux.give_back(self.slot)
        return False

    def close(self) -> None:
        """Prefill has said that no write is in flight, or is gone."""
        self.lifecycle.advance(S.CLOSED)
        if self._landed is not None:
            self._landed.cancel()
        self._transfer.aux.give_back(self.slot)


async def _verify(record: AuxRecord, sent: Sent, checksums: PageChecksums) -> None:
    """Raises: TransferFailed, when prefill sent no checksums; KvCorrupt, naming the pages that are not as they were sent.

    Pages that are smaller than prefill's share a checksum, and are named together.
    """
    if record.checksums is None:
        raise TransferFailed("KV cannot be verified: prefill sent no checksums; it is of an older version")
    landed = checksums.of_transfer(sent.page_size)
    if not record.intact or len(record.checksums) != landed.num_sums(sent.tokens):
        raise KvCorrupt("the aux slot did not arrive as prefill wrote it")
    await landed.add(sent.pages, sent.tokens)
    both = zip(record.checksums, landed.sums, strict=True)
    wrong = [i for i, (was, now) in enumerate(both) if was != now]
    pages = [sent.pages[entry] for i in wrong for entry in landed.covered(i, sent.tokens)]
    if pages:
        named = ", ".join(map(str, pages[:NAMED])) + (", …" if len(pages) > NAMED else "")
        raise KvCorrupt(
            f"{len(pages)} of {landed.num_pages(sent.tokens)} pages did not arrive as prefill sent them: {named}"
        )
