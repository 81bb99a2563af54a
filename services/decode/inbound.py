"""One transfer into this decode instance."""

import asyncio
import time
from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Final

from components.aio import Failure, exception_of
from components.errors import KvCorrupt, ListenerGone, NobodyListens, Overloaded, StaleInstance, TransferFailed
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import Checksums, PageChecksums
from components.lifecycle import Lifecycle, Tally
from components.telemetry.spans import step
from components.wire.instances import InstanceRecord
from engine.ports import Exposed

REFUSALS: Final = (NobodyListens, StaleInstance, Overloaded)  # the instance has ended, restarted, or is leaving
MAX_NAMED: Final = 16  # pages in an error message


class InboundState(StrEnum):
    """In TRANSFER and PINNED prefill may write into our pages, so they must not be reused."""

    PREALLOC = auto()  # no page has been offered yet
    TRANSFER = auto()  # pages are offered to prefill
    LANDED = auto()  # prefill has written everything
    PINNED = auto()  # failed after the offer; pages are kept until prefill can no longer write
    CLOSED = auto()  # failed, and prefill cannot write


S = InboundState
NEXT: Final = {
    S.PREALLOC: {S.TRANSFER, S.CLOSED},
    S.TRANSFER: {S.LANDED, S.PINNED},
    S.PINNED: {S.CLOSED},
}


class InboundTransfer:
    """One prompt's KV. Holds an aux slot until it has landed or is closed."""

    prefill_call: asyncio.Task[None] | None = None
    is_room_open = False
    is_quiet = False  # prefill has reported that it writes no more
    offer_end_s = 0.0  # monotonic; deadline of the offer: prefill posts no write after it

    def __init__(
        self,
        transfer: KvTransfer,
        engine_id: str,
        prefill: InstanceRecord,
        room: str,
        stamp: int,
        *,
        checksums: PageChecksums | None,  # if KV is to be verified
        tally: Tally[InboundState],
    ) -> None:
        """Raises: QueueFull, if no aux slot is free."""
        self.slot = transfer.aux.take()
        self.engine_id = engine_id
        self.prefill = prefill
        self.room = room
        self.stamp = stamp
        self.failure = Failure()
        self.began_s = time.monotonic()
        self.exposed_s = 0.0  # monotonic; when the offer was sent; 0: not yet
        self.duration_s = 0.0  # from the offer to the arrival of all KV
        self.lifecycle = Lifecycle(f"inbound {engine_id}", NEXT, S.PREALLOC, tally)
        self.reserved: asyncio.Future[Exposed] = asyncio.get_running_loop().create_future()
        self._transfer = transfer
        self._checksums = checksums
        self._landed: asyncio.Future[None] | None = None

    @property
    def refusal(self) -> BaseException | None:
        """Prefill's refusal of the prompt, or the error of the call."""
        call = self.prefill_call
        return exception_of(call) if call is not None and call.done() else None

    @property
    def is_accepted(self) -> bool:
        """True if prefill has accepted the prompt."""
        return self.prefill_call is not None and self.prefill_call.done() and self.refusal is None

    @property
    def has_pages(self) -> bool:
        return self.reserved.done()

    @property
    def another_may_accept(self) -> bool:
        """True if this prefill instance never started the prompt, for a reason that may not apply to another one."""
        return isinstance(self.refusal, REFUSALS) and not isinstance(self.refusal, ListenerGone)

    @property
    def reached_no_process(self) -> bool:
        """True if certainly no process received the prompt, so none can write into our pages."""
        return isinstance(self.refusal, NobodyListens) and not isinstance(self.refusal, ListenerGone)

    @property
    def waits_for_prefill(self) -> bool:
        """True if prefill causes a delay; False while the transfer waits for our own pages or for bootstrap."""
        call = self.prefill_call
        return self.is_room_open or call is None or not call.done() or self.refusal is not None

    def expose(self, offer_end_s: float) -> None:
        """Call before the offer leaves."""
        self.offer_end_s = offer_end_s
        self.exposed_s = time.monotonic()
        self.lifecycle.advance(S.TRANSFER)
        self._landed = self._transfer.expect(self.room, self.slot)

    async def landed(self, pages: Sequence[int], tokens: range) -> AuxRecord:
        """Wait until prefill has written `tokens` into our block table `pages`. Raises: TransferFailed; KvCorrupt."""
        assert self._landed is not None, "expose() comes first"
        await asyncio.shield(self._landed)  # to cancel it would stop our polls, which prefill's write needs
        record = self._transfer.aux.read(self.slot)
        found, expected = (record.stamp, record.num_pages), (self.stamp, len(pages))
        if found != expected:
            raise TransferFailed(
                f"the aux slot belongs to another transfer: it has stamp {found[0]} and {found[1]} pages instead of "
                f"{expected[0]} and {expected[1]}"
            )
        if self._checksums is not None:
            with step("decode.verify"):
                assert self.prefill.kv is not None, "an instance without KV is not chosen"
                theirs = self.prefill.kv.layout
                landed = self._checksums.of_transfer(theirs.page_size, theirs.shards, every_copy=True)
                await _verify(record, pages, tokens, landed)
        self.lifecycle.advance(S.LANDED)
        self.duration_s = time.monotonic() - self.exposed_s
        self._transfer.aux.give_back(self.slot)
        return record

    def give_up(self) -> InboundState:
        """Return PINNED if prefill may still write into our pages: the caller must then call `close`."""
        if self.lifecycle.state is S.TRANSFER:
            self.lifecycle.advance(S.PINNED)
        elif self.lifecycle.state is S.PREALLOC:
            self.close()
        return self.lifecycle.state

    def close(self) -> None:
        """Call once prefill can no longer write into our pages."""
        self.lifecycle.advance(S.CLOSED)
        if self._landed is not None:
            self._landed.cancel()
        self._transfer.aux.give_back(self.slot)


async def _verify(record: AuxRecord, pages: Sequence[int], tokens: range, landed: Checksums) -> None:
    """Raises: TransferFailed; KvCorrupt, naming all pages that share a wrong checksum."""
    if record.checksums is None:
        raise TransferFailed("KV cannot be verified: prefill sent no checksums; its version is too old")
    if not record.intact or len(record.checksums) != landed.num_sums(tokens):
        raise KvCorrupt("the aux slot was corrupted on its way from prefill")
    await landed.add(pages, tokens)
    both = zip(record.checksums, await landed.total(), strict=True)
    wrong = [i for i, (was, now) in enumerate(both) if was != now]
    broken = [pages[entry] for i in wrong for entry in landed.covered(i, tokens)]
    if broken:
        named = ", ".join(map(str, broken[:MAX_NAMED])) + (", …" if len(broken) > MAX_NAMED else "")
        raise KvCorrupt(
            f"{len(broken)} of {landed.num_pages(tokens)} pages did not arrive as prefill sent them: {named}"
        )
