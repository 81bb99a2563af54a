"""Prefill's side of one transfer: pages leave as they are computed, the aux slot last."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum, auto
from typing import Final, TypeVar

from components.aio import ended, time_limit
from components.errors import TransferFailed
from components.kv_transfer.aux import AuxRecord, room_for_checksums
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import PageChecksums, TransferChecksums
from components.kv_transfer.pieces import cut
from components.lifecycle import Lifecycle
from components.messaging.deadline import remaining_s
from components.telemetry.spans import tracer
from components.wire.instances import KvEndpoint
from components.wire.logprobs import TokenLogprobs
from components.wire.rooms import PagesOffered

T = TypeVar("T")


class SendState(StrEnum):
    """Life of one KV transfer as prefill sees it; one transfer per bootstrap room."""

    BOOTSTRAPPING = auto()  # the prompt may be computing, decode's pages are not known yet
    TRANSFERRING = auto()  # pages leave as they are computed
    DONE = auto()  # everything has landed, decode was told
    FAILED = auto()  # nothing more will be written; no write is in flight


S = SendState
NEXT: Final = {
    S.BOOTSTRAPPING: {S.TRANSFERRING, S.FAILED},
    S.TRANSFERRING: {S.DONE, S.FAILED},
}


async def _silently(_: PagesOffered) -> None:
    """Tell nobody."""


class Sender:
    """Brings two streams of news together: what decode offers, and what the engine has computed."""

    def __init__(
        self,
        transfer: KvTransfer,
        request_id: str,
        num_tokens: int,
        *,
        checksums: PageChecksums | None = None,  # when decode verifies what it gets
        bootstrap_timeout_s: float | None = None,  # for decode's offer
        announce: Callable[[PagesOffered], Awaitable[None]] = _silently,  # awaited before the last pages are written
    ) -> None:
        self.lifecycle = Lifecycle(f"send {request_id}", NEXT, S.BOOTSTRAPPING)
        self.num_bytes = 0  # of pages, as the backend reports them
        self.duration_s = 0.0  # from the offer to the aux slot
        self._transfer = transfer
        self._num_tokens = num_tokens  # of the whole prompt
        self._layout = transfer.endpoint.layout
        self._checksums = checksums
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._announce = announce
        self._sums: TransferChecksums | None = None  # of what was sent so far
        self._offer: asyncio.Future[tuple[PagesOffered, KvEndpoint, int]] = asyncio.get_running_loop().create_future()
        self._pages: list[int] = []
        self._num_computed = 0  # leading tokens whose KV stands in our pages
        self._last: tuple[int, int, TokenLogprobs | None] | None = None
        self._news = asyncio.Event()

    def offered(self, offer: PagesOffered, peer: KvEndpoint, stamp: int) -> None:
        """Decode's pages are known; a second offer for the same room changes nothing."""
        if not self._offer.done():
            self._offer.set_result((offer, peer, stamp))

    def computed(self, pages: list[int], num_computed: int) -> None:
        """The KV of the first `num_computed` prompt tokens stands in `pages`."""
        self._pages = pages
        self._num_computed = num_computed
        self._news.set()

    def completed(
        self, pages: list[int], first_token: int, num_cached_tokens: int, logprobs: TokenLogprobs | None = None
    ) -> None:
        """The KV of the whole prompt stands in `pages`, and its first token is drawn."""
        self._pages = pages
        self._num_computed = self._num_tokens
        self._last = (first_token, num_cached_tokens, logprobs)
        self._news.set()

    async def run(self) -> None:
        """Write everything, then the aux slot; on cancellation the write in flight is still awaited.

        Raises: TransferFailed, IncompatibleLayout, DeadlineExceeded.
        """
        try:
            async with time_limit(self._bootstrap_timeout_s, "decode did not offer its pages in"):
                offer, peer, stamp = await self._offer
            self.lifecycle.advance(S.TRANSFERRING)
            async with time_limit(remaining_s(offer.deadline_unix_ms), "the transfer did not end in"):
                await self._send(offer, peer, stamp)
            self.lifecycle.advance(S.DONE)
        except BaseException:
            self.lifecycle.advance(S.FAILED)
            raise

    async def _send(self, offer: PagesOffered, peer: KvEndpoint, stamp: int) -> None:
        with tracer.start_as_current_span("prefill.transfer") as span:
            span.set_attribute("kvmesh.transfer.backend", peer.backend)
            started = time.monotonic()
            self._sums = self._begin_checksums(offer, peer)
            await self._transfer.connect(peer)
            await self._send_pages(offer, peer)
            span.set_attribute("kvmesh.transfer.bytes", self.num_bytes)
            await self._send_aux(offer, peer, stamp)
            self.duration_s = time.monotonic() - started

    async def _send_pages(self, offer: PagesOffered, peer: KvEndpoint) -> None:
        unit = min(self._layout.page_size, peer.layout.page_size)
        sent = offer.num_cached_pages * peer.layout.page_size
        while sent < self._num_tokens:
            while (ready := self._num_ready(unit)) <= sent:
                self._news.clear()
                await self._news.wait()
            if ready == self._num_tokens:
                await self._announce(offer)
            self.num_bytes += await _to_its_end(self._write(offer, peer, range(sent, ready)))
            sent = ready
        while self._last is None:
            self._news.clear()
            await self._news.wait()

    def _num_ready(self, unit: int) -> int:
        """Leading tokens that may leave: whole pages of the smaller size, so that no piece of one is cut in two."""
        computed = self._num_computed
        return computed if computed == self._num_tokens else computed // unit * unit

    def _write(self, offer: PagesOffered, peer: KvEndpoint, tokens: range) -> Awaitable[int]:
        """Write `tokens`, and meanwhile sum them: both only read our pages."""
        write = self._begin_write(offer, peer, tokens)
        return write if self._sums is None else self._summed(write, self._sums, tokens)

    async def _summed(self, write: Awaitable[int], sums: TransferChecksums, tokens: range) -> int:
        summing = asyncio.ensure_future(sums.add(self._pages, tokens))
        try:
            moved = await write
        finally:
            await ended(summing)
        summing.result()
        return moved

    def _begin_write(self, offer: PagesOffered, peer: KvEndpoint, tokens: range) -> Awaitable[int]:
        """Post a write. Rows of a last page that no token fills go along with a whole page, not in pieces.

        Raises: DeadlineExceeded. After the offer's deadline decode may take a prefill that it cannot reach for gone, and
        use its pages again. The time limit alone would not do: a process that was stopped may get here before its timer.
        """
        remaining_s(offer.deadline_unix_ms)
        if peer.layout.page_size != self._layout.page_size:
            pieces = cut(self._layout, peer.layout, tokens, self._pages, offer.pages)
            return self._transfer.write_pieces(peer.agent, pieces)
        pages = slice(tokens.start // self._layout.page_size, self._layout.pages_for(tokens.stop))
        return self._transfer.write_pages(peer.agent, self._pages[pages], offer.pages[pages])

    def _begin_checksums(self, offer: PagesOffered, peer: KvEndpoint) -> TransferChecksums | None:
        """None where decode does not ask for them. Raises: TransferFailed, when the aux slot cannot hold them all."""
        if self._checksums is None:
            return None
        sums = self._checksums.of_transfer(peer.layout.page_size)
        needed = sums.num_sums(range(offer.num_cached_pages * peer.layout.page_size, self._num_tokens))
        room = room_for_checksums(min(self._transfer.aux.slot_bytes, peer.aux_slot_bytes))
        if needed > room:
            raise TransferFailed(f"KV cannot be verified: it has {needed} checksums, but aux slots hold {room}")
        return sums

    async def _send_aux(self, offer: PagesOffered, peer: KvEndpoint, stamp: int) -> None:
        assert self._last is not None
        slot = self._transfer.aux.take()
        try:
            checksums = None if self._sums is None else tuple(self._sums.sums)
            first_token, num_cached_tokens, logprobs = self._last
            num_pages = peer.layout.pages_for(self._num_tokens)
            record = AuxRecord(stamp, num_pages, first_token, num_cached_tokens, checksums, logprobs=logprobs)
            self._transfer.aux.write(slot, record)
            remaining_s(offer.deadline_unix_ms)  # as for pages
            await _to_its_end(self._transfer.write_aux(peer.agent, slot, offer.aux_slot, offer.room))
        finally:
            self._transfer.aux.give_back(slot)


async def _to_its_end(write: Awaitable[T]) -> T:
    """Await a write even when cancelled: whoever cancelled may reuse the pages as soon as we return."""
    writing = asyncio.ensure_future(write)
    await ended(writing)
    return writing.result()
