"""One transfer from this prefill instance: pages are written to decode while the next chunk is computed."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum, auto
from typing import Any, Final, TypeVar

from opentelemetry.trace import Span

from components.aio import Failure, ended
from components.errors import Cancelled, DeadlineExceeded, InvariantBroken, MeshError, TransferFailed
from components.kv_transfer.aux import AuxRecord, room_for_checksums
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import Checksums, PageChecksums
from components.kv_transfer.writes import Copy, Writes
from components.lifecycle import Lifecycle, Tally
from components.messaging.clocks import now_ms, remaining_s
from components.telemetry.spans import EndingSpan, mark_outcome, record_step, step
from components.wire.instances import KvEndpoint
from components.wire.prefill import PagesOffered, PrefillRequest
from components.wire.tokens import num_tokens
from engine.ports import Exposed

log = logging.getLogger(__name__)

T = TypeVar("T")


class OutboundState(StrEnum):
    BOOTSTRAPPING = auto()  # waits for decode's offer; the prompt may already be computed
    WAITING = auto()  # the prompt is queued
    COMPUTING = auto()  # chunks are computed and written
    INFLIGHT = auto()  # the prompt is computed; writes are in progress
    DONE = auto()  # decode has all pages and the aux slot
    FAILED = auto()  # no write is in flight or will be posted


S = OutboundState
NEXT: Final = {
    S.BOOTSTRAPPING: {S.WAITING, S.COMPUTING, S.INFLIGHT, S.FAILED},
    S.WAITING: {S.COMPUTING, S.INFLIGHT, S.FAILED},
    S.COMPUTING: {S.INFLIGHT, S.FAILED},
    S.INFLIGHT: {S.DONE, S.FAILED},
}


class OutboundTransfer:
    """Writes the pages that the engine computes into the pages that decode offers."""

    task: asyncio.Task[None]

    def __init__(
        self,
        transfer: KvTransfer,
        request: PrefillRequest,
        span: Span,
        *,
        tally: Tally[OutboundState],
        writes: Writes,  # of all ranks
        checksums: PageChecksums | None,  # if decode verifies
        bootstrap_timeout_s: float,  # until decode's offer
        announce: Callable[[PagesOffered, Exposed], Awaitable[None]],  # before the last write
        num_cached: int,  # prefix hit: must not count as queued
        step_s: Callable[[], float],  # duration of the engine's last step
    ) -> None:
        self.request = request
        self.offer: PagesOffered | None = None
        self.failure = Failure()
        self.num_tokens = num_tokens(request.token_ids)
        self.number = 0  # number of the request in our answer to decode; heartbeats report the latest one
        self.num_bytes = 0
        self.duration_s = 0.0  # from the offer to the aux slot
        self.lifecycle = Lifecycle(f"prefill {request.request_id}", NEXT, S.BOOTSTRAPPING, tally)
        self._transfer = transfer
        self._writes = writes
        self._layout = transfer.endpoint.layout
        self.span = span
        self._checksums = checksums
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._announce = announce
        self._num_cached = num_cached
        self._step_s = step_s
        self.began_s = time.monotonic()
        self._submitted_ns = time.time_ns()
        self._started_ns = 0
        self._computed_ns = 0
        self._peer: KvEndpoint | None = None
        self._computed: Exposed | None = None
        self._sums: Checksums | None = None
        self._changed = asyncio.Event()  # set by an offer, a chunk or a failure
        self._limit: asyncio.TimerHandle | None = None

    @property
    def tokens_left(self) -> int:
        return self.num_tokens - (self._num_cached if self._computed is None else self._computed.num_computed)

    def offered(self, offer: PagesOffered, peer: KvEndpoint) -> None:
        """A second offer, and one after the end, are ignored."""
        if self.lifecycle.state is not S.BOOTSTRAPPING:
            return
        self.offer, self._peer = offer, peer
        record_step("prefill.bootstrap", self._submitted_ns, of=self.span)
        self.lifecycle.advance(S.INFLIGHT if self._computed_ns else S.COMPUTING if self._started_ns else S.WAITING)
        self._changed.set()

    def computed(self, event: Exposed) -> None:
        now_ns = time.time_ns()
        self._computed = event
        if not self._started_ns:
            self._started_ns = max(self._submitted_ns, now_ns - int(self._step_s() * 1e9))
        if event.first_token is not None:
            self._computed_ns = now_ns
            self._record_computing(event)
        if self.lifecycle.state in (S.WAITING, S.COMPUTING):
            following = S.INFLIGHT if self._computed_ns else S.COMPUTING
            if following is not self.lifecycle.state:
                self.lifecycle.advance(following)
        self._changed.set()

    async def run(self, before: Callable[[], Awaitable[None]] | None = None) -> MeshError | None:
        """Send all pages, after `before`. Returns the error if it failed. No write is in flight afterwards."""
        with EndingSpan(self.span):
            try:
                outcome = await self._outcome(before)
                if outcome is None:
                    record_step("prefill.inflight", self._computed_ns, of=self.span)
                    self.lifecycle.advance(S.DONE)
                else:
                    self._report(outcome)
                return outcome
            finally:
                self._stop_limit()
                if not self.lifecycle.is_over:
                    self.lifecycle.advance(S.FAILED)
                if log.isEnabledFor(logging.DEBUG):
                    self._log_end()

    def _log_end(self) -> None:
        now_ns = time.time_ns()
        started_ns, computed_ns = self._started_ns or now_ns, self._computed_ns or now_ns
        facts = {
            "state": str(self.lifecycle.state),
            "prompt_tokens": self.num_tokens,
            "cached_tokens": self._num_cached,
            "bytes": self.num_bytes,
            "queue_s": round((started_ns - self._submitted_ns) / 1e9, 4),
            "compute_s": round((computed_ns - started_ns) / 1e9, 4),
            "inflight_s": round((now_ns - computed_ns) / 1e9, 4),
            "decode": self.request.decode_id,
        }
        log.debug("request ended", extra=facts)

    def _record_computing(self, event: Exposed) -> None:
        record_step("prefill.queue", self._submitted_ns, self._started_ns, self.span)
        record_step(
            "prefill.compute",
            self._started_ns,
            self._computed_ns,
            self.span,
            attributes={"kvmesh.prompt_tokens": event.num_computed, "kvmesh.cached_tokens": event.num_cached_tokens},
        )

    def _report(self, outcome: MeshError) -> None:
        mark_outcome(self.span, outcome)
        facts = {"cause": outcome.message}
        if isinstance(outcome, Cancelled):
            log.debug("cancelled by the client", extra=facts)
        else:
            log.warning("transfer failed", extra=facts)

    async def _outcome(self, before: Callable[[], Awaitable[None]] | None) -> MeshError | None:
        try:
            await self.failure.unless(self._run(before))
        except MeshError as exc:
            return exc
        except Exception as exc:  # the edge of one request
            log.exception("transfer failed")
            return InvariantBroken(f"transfer failed: {type(exc).__name__}")
        return None

    async def _run(self, before: Callable[[], Awaitable[None]] | None) -> None:
        self._limit_to(None, "")
        if before is not None:
            await before()
        self._limit_to(self._bootstrap_timeout_s, "decode did not offer its pages within")
        while self.offer is None or self._peer is None:
            await self._change()
        self._limit_to(remaining_s(self.offer.deadline_unix_ms), "the transfer did not finish within")
        await self._send(self.offer, self._peer)

    def _limit_to(self, seconds: float | None, late: str) -> None:
        """Fail the transfer after `seconds`, or at the request's deadline. Replaces the previous limit."""
        self._stop_limit()
        left_s = max(0.0, self.request.deadline_unix_ms - now_ms()) / 1000
        error = DeadlineExceeded("the transfer did not finish before the request's deadline")
        if seconds is not None and seconds < left_s:
            left_s, error = seconds, DeadlineExceeded(f"{late} {seconds:g} s")
        self._limit = asyncio.get_running_loop().call_later(left_s, self.failure.report, error)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _send(self, offer: PagesOffered, peer: KvEndpoint) -> None:
        with step("prefill.transfer", self.span) as sending:
            started = time.monotonic()
            self._sums = self._begin_checksums(offer, peer)
            await self._writes.connect(peer)
            last = await self._send_pages(offer, peer)
            sending.note({"kvmesh.transfer.backend": peer.backend, "kvmesh.transfer.bytes": self.num_bytes})
            await self._send_aux(offer, peer, last)
            self.duration_s = time.monotonic() - started

    async def _send_pages(self, offer: PagesOffered, peer: KvEndpoint) -> Exposed:
        unit = min(self._layout.page_size, peer.layout.page_size)
        sent = offer.num_cached_pages * peer.layout.page_size
        while True:
            computed = self._computed
            if computed is not None and (ready := self._num_ready(computed, unit)) > sent:
                if ready == self.num_tokens:
                    await self._announce(offer, computed)
                self.num_bytes += await _to_its_end(self._write(offer, peer, computed.pages, range(sent, ready)))
                sent = ready
            elif computed is not None and computed.first_token is not None:
                return computed
            else:
                await self._change()

    def _num_ready(self, computed: Exposed, unit: int) -> int:
        """Leading tokens that can be written: whole pages of the smaller size, so that no piece is cut."""
        if computed.num_computed == self.num_tokens or computed.first_token is not None:
            return self.num_tokens
        return computed.num_computed // unit * unit

    def _write(self, offer: PagesOffered, peer: KvEndpoint, ours: list[int], tokens: range) -> Awaitable[int]:
        if self._sums is None:
            return self._begin_write(offer, peer, ours, tokens)
        return self._write_and_sum(self._sums, offer, peer, ours, tokens)

    async def _write_and_sum(
        self, sums: Checksums, offer: PagesOffered, peer: KvEndpoint, ours: list[int], tokens: range
    ) -> int:
        """Write `tokens` and compute their checksums at the same time: both only read the pages."""
        write = self._begin_write(offer, peer, ours, tokens)
        summing = asyncio.ensure_future(sums.add(ours, tokens))
        try:
            moved = await write
        finally:
            await ended(summing)
        summing.result()
        return moved

    def _begin_write(self, offer: PagesOffered, peer: KvEndpoint, ours: list[int], tokens: range) -> Awaitable[int]:
        return self._writes.write(peer, Copy(tokens, ours, offer.pages), offer.deadline_unix_ms)

    def _begin_checksums(self, offer: PagesOffered, peer: KvEndpoint) -> Checksums | None:
        """Raises: TransferFailed, if the aux slot is too small."""
        if self._checksums is None:
            return None
        sums = self._checksums.of_transfer(peer.layout.page_size, peer.layout.shards)
        needed = sums.num_sums(range(offer.num_cached_pages * peer.layout.page_size, self.num_tokens))
        room = room_for_checksums(min(self._transfer.aux.slot_bytes, peer.aux_slot_bytes))
        if needed > room:
            raise TransferFailed(f"KV cannot be verified: it has {needed} checksums, but aux slots hold {room}")
        return sums

    async def _send_aux(self, offer: PagesOffered, peer: KvEndpoint, last: Exposed) -> None:
        assert last.first_token is not None
        slot = self._transfer.aux.take()
        try:
            record = AuxRecord(
                stamp=self.request.stamp,
                num_pages=peer.layout.pages_for(self.num_tokens),
                first_token=last.first_token,
                num_cached_tokens=last.num_cached_tokens,
                checksums=None if self._sums is None else tuple(await self._sums.total()),
                logprobs=last.logprobs,
            )
            self._transfer.aux.write(slot, record)
            deadline_ms = offer.deadline_unix_ms
            await _to_its_end(self._transfer.write_aux(peer.agent, slot, offer.aux_slot, offer.room, deadline_ms))
        finally:
            self._transfer.aux.give_back(slot)


async def _to_its_end(write: Awaitable[T]) -> T:
    """Await the end of a write even if the caller is cancelled, because its pages may be reused afterwards."""
    writing: asyncio.Future[Any] = asyncio.ensure_future(write)
    await ended(writing)
    result: T = writing.result()
    return result
