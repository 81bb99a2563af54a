"""KV transfer inside this process: copies bytes between the pools of two engines, piece by piece.

A piece is half a page, or less between pages of different sizes, so that a page can arrive in part. An aux slot is copied in
cache lines, in any order. Decode is notified of the end, or polls the slot's seal, as with NIXL. Bytes are read when the
piece lands, not when it is posted: this reveals a source page that was freed too early. A stopped process pauses its
writes; the last pieces of a killed one may still land. A target page must be held for the transfer of its write.
"""

import asyncio
import contextvars
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from components.errors import KvCorrupt, TransferFailed
from components.kv_transfer.aux import CACHE_LINE, AuxBuffer
from components.kv_transfer.backend import check_deadline, endpoint_of
from components.kv_transfer.pieces import Pieces
from components.wire.instances import KvEndpoint
from components.wire.layout import KvRegion, check_compatible
from tests.faults.virtual_loop import Process

WRITE_S: Final = 0.004
LOOK_EVERY_S: Final = 0.005
LAST_PIECES_S: Final = 3.0  # writes of a dead process may land for so long
AUX_SLOTS: Final = 16
MARK_BYTES: Final = 8  # of a piece: the mock uses no others of a row
AUX_FACTS: Final = (12, 16, 64)  # first token, number of cached tokens, first alternative


@dataclass(frozen=True, slots=True)
class WriteFault:
    delay_s: float = 0.0
    fails: bool = False  # after some pieces
    is_silent: bool = False  # no notification of an aux slot
    stamp: int = 0  # added to the aux slot's
    corrupts: bool = False  # one bit is flipped


class WriteMeddler(Protocol):
    """Injects faults into writes."""

    def write(self, agent: str, kind: str) -> WriteFault:
        """Called for each posted write. `kind`: pages or aux."""


class Fabric:
    """The agents and their writes."""

    def __init__(self, meddler: WriteMeddler, random: Random) -> None:
        self.agents: dict[str, MemoryTransfer] = {}
        self.meddler = meddler
        self.random = random
        self.context = contextvars.Context()
        self.violations: list[str] = []
        self.landed: dict[tuple[str, int], object] = {}  # by agent and address: the request that holds the page


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to copy."""

    source: int  # address
    target: int  # address
    size: int
    page: int | None = None  # of the target's pool
    slot: int | None = None  # of its aux buffer
    facts: tuple[int, ...] = ()  # of an aux slot: offsets in this piece of fields that decode reads

    @property
    def is_read(self) -> bool:
        """Whether a flipped bit is noticed."""
        return self.slot is None or bool(self.facts)


class _Write:
    """One posted write."""

    def __init__(
        self,
        fabric: Fabric,
        source: "MemoryTransfer",
        target: "MemoryTransfer",
        pieces: list[Piece],
        fault: WriteFault,
        notification: str,
    ) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._fabric = fabric
        self._source, self._target = source, target
        self._fault = fault
        self._notification = notification
        self._num_bytes = sum(piece.size for piece in pieces)
        self._holders = {piece.page: target.holder(piece.page) for piece in pieces if piece.page is not None}
        self._died_s: float | None = None
        lost = fabric.random.randint(1, len(pieces)) if fault.fails else 0
        self._pieces = pieces[: len(pieces) - lost]
        self._hit = fabric.random.choice([p for p in pieces if p.is_read]) if fault.corrupts else None
        # Late pages are spread over the delay. A late aux slot lands at its end.
        before_s, during_s = (fault.delay_s, 0.0) if notification else (0.0, fault.delay_s)
        self._each_s = (during_s + WRITE_S * fabric.random.random()) / (len(self._pieces) + 1)
        self._later(before_s + self._each_s)

    def _later(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + delay_s, self._next, context=self._fabric.context)

    def _next(self) -> None:
        if self.done.done() or self._died():
            return
        if not self._source.process.runs and not self._source.process.is_dead:
            self._source.process.continued.append(lambda: self._later(self._each_s))
            return
        if self._target.is_gone or self._target.endpoint.agent not in self._source.peers:
            self.done.set_exception(TransferFailed("the peer is lost"))
            return
        if self._pieces:
            self._land(self._pieces.pop(0))
            self._later(self._each_s)
            return
        if self._fault.fails:
            self.done.set_exception(TransferFailed("the write failed"))
            return
        if self._notification and not self._fault.is_silent and not self._target.seals:
            self._target.notify(self._notification)
        self.done.set_result(self._num_bytes)

    def _land(self, piece: Piece) -> None:
        ctypes.memmove(piece.target, piece.source, piece.size)
        if piece is self._hit:
            self._corrupt(piece)
        # A repeated piece may land after decode has seen the seal and freed the slot.
        if piece.slot is not None and self._target.slots.get(piece.slot, self._notification) != self._notification:
            self._fabric.violations.append(
                f"{self._source.endpoint.agent} wrote into aux slot {piece.slot} of {self._target.endpoint.agent}, "
                "which was held for another"
            )
        if piece.page is None:
            return
        holder = self._holders[piece.page]
        place = (self._target.endpoint.agent, piece.target)
        if holder is not None and self._fabric.landed.get(place) is holder:
            self._fabric.violations.append(
                f"{self._source.endpoint.agent} wrote again what was in page {piece.page} of {self._target.endpoint.agent}"
            )
        self._fabric.landed[place] = holder
        if holder is None or self._target.holder(piece.page) is not holder:
            self._fabric.violations.append(
                f"{self._source.endpoint.agent} wrote into page {piece.page} of {self._target.endpoint.agent}, "
                "which was not held for that any more"
            )

    def _corrupt(self, piece: Piece) -> None:
        draw = self._fabric.random
        offset = draw.choice(piece.facts) if piece.page is None else draw.randrange(MARK_BYTES)
        ctypes.c_ubyte.from_address(piece.target + offset).value ^= 1 << draw.randrange(8)

    def _died(self) -> bool:
        """Whether the sender died so long ago that none of its writes may land."""
        now_s = asyncio.get_running_loop().time()
        if self._source.process.is_dead and self._died_s is None:
            self._died_s = now_s
        return self._died_s is not None and now_s - self._died_s > LAST_PIECES_S


class MemoryTransfer:
    """Implements `components.kv_transfer.backend.KvTransfer`."""

    def __init__(
        self,
        fabric: Fabric,
        region: KvRegion,
        max_request_pages: int,
        agent: str,
        process: Process,
        holder: Callable[[int], object | None],
        *,
        seals: bool,
    ) -> None:
        """`seals`: decode polls the aux slot, and is not notified."""
        self.aux = AuxBuffer(AUX_SLOTS, max_request_pages)
        self.seals = seals
        self.slots: dict[int, str] = {}  # the notification that each waits for
        self.holder = holder  # page → the request to whose transfer it is exposed
        self.is_closed = False
        self.process = process
        self.peers: set[str] = set()
        self.expected: dict[str, asyncio.Future[None]] = {}
        self.endpoint = endpoint_of("memory", agent, "", region, self.aux)
        self._fabric = fabric
        self._posted: set[asyncio.Future[int]] = set()
        fabric.agents[agent] = self

    @property
    def is_gone(self) -> bool:
        return self.is_closed or self.process.is_dead

    def close(self) -> None:
        """The process leaves without waiting for its writes."""
        self.is_closed = True
        for posted in self._posted:
            posted.set_exception(TransferFailed("the writer leaves"))

    async def connect(self, peer: KvEndpoint) -> None:
        check_compatible(self.endpoint.layout, peer.layout)
        await asyncio.sleep(WRITE_S * self._fabric.random.random())
        if self._fabric.agents[peer.agent].is_gone:
            raise TransferFailed(f"no connection to {peer.agent}")
        self.peers.add(peer.agent)

    async def disconnect(self, agent: str) -> None:
        await asyncio.sleep(0)
        self.peers.discard(agent)

    async def write_pages(self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int) -> int:
        size = self.endpoint.layout.page_bytes // 2
        there = self._peer(agent).endpoint
        pieces = [
            Piece(
                self.endpoint.base_address + (2 * ours + half) * size,
                there.base_address + (2 * theirs + half) * size,
                size,
                theirs,
            )
            for ours, theirs in zip(source, target, strict=True)
            for half in (0, 1)
        ]
        return await self._write(agent, pieces, self._fabric.meddler.write(agent, "pages"), deadline_unix_ms)

    async def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> int:
        there = self._peer(agent).endpoint
        page_bytes = there.layout.page_bytes
        # between pages of one size in halves, like whole pages
        parts = 2 if there.layout.page_size == self.endpoint.layout.page_size else 1
        copies = [
            Piece(
                self.endpoint.base_address + source + part * size // parts,
                there.base_address + target + part * size // parts,
                size // parts,
                target // page_bytes,
            )
            for source, target, size in zip(
                pieces.source.tolist(), pieces.target.tolist(), pieces.length.tolist(), strict=True
            )
            for part in range(parts)
        ]
        return await self._write(agent, copies, self._fabric.meddler.write(agent, "pages"), deadline_unix_ms)

    async def write_aux(
        self, agent: str, source_slot: int, target_slot: int, notification: str, deadline_unix_ms: int
    ) -> None:
        fault = self._fabric.meddler.write(agent, "aux")
        if fault.stamp:
            self.aux._heads[source_slot]["stamp"] += fault.stamp
        if self.seals:
            self.aux.seal(source_slot, notification)
        ours, theirs = self.aux, self._peer(agent).aux
        size = min(len(ours.raw(source_slot)), theirs.slot_bytes)  # the rest is empty
        source, target = (
            ours.address + source_slot * ours.slot_bytes,
            theirs.address + target_slot * theirs.slot_bytes,
        )
        lines = [
            Piece(
                source + at,
                target + at,
                CACHE_LINE,
                slot=target_slot,
                facts=tuple(fact - at for fact in AUX_FACTS if at <= fact < at + CACHE_LINE),
            )
            for at in range(0, size, CACHE_LINE)
        ]
        self._fabric.random.shuffle(lines)
        await self._write(agent, lines, fault, deadline_unix_ms, notification)

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.expected[notification], self.slots[slot] = future, notification
        future.add_done_callback(lambda _: self.expected.pop(notification, None))
        if self.seals:
            self._look(notification, slot)
        return future

    def _look(self, notification: str, slot: int) -> None:
        """Repeat until the slot is sealed or damaged, or no call waits for it."""
        future, loop = self.expected.get(notification), asyncio.get_running_loop()
        if future is None or future.done():
            return
        if self.aux.is_sealed(slot, notification):
            future.set_result(None)
        elif self.aux.is_damaged(slot, loop.time()):
            future.set_exception(KvCorrupt("the aux slot was corrupted on its way from prefill"))
            future.exception()  # marks it as retrieved: the caller may have gone
        else:
            loop.call_later(LOOK_EVERY_S, self._look, notification, slot)

    def poll_often(self, notification: str) -> None:
        """Polls are always frequent here."""

    async def drain_sockets(self) -> None:
        """There are no sockets."""

    def notify(self, notification: str) -> None:
        future = self.expected.get(notification)
        if future is not None and not future.done():
            future.set_result(None)

    def _peer(self, agent: str) -> "MemoryTransfer":
        if agent not in self.peers:
            raise TransferFailed(f"no connection to {agent}")
        return self._fabric.agents[agent]

    async def _write(
        self, agent: str, pieces: list[Piece], fault: WriteFault, deadline_unix_ms: int, notification: str = ""
    ) -> int:
        check_deadline(deadline_unix_ms)
        write = _Write(self._fabric, self, self._fabric.agents[agent], pieces, fault, notification)
        self._posted.add(write.done)
        write.done.add_done_callback(self._posted.discard)
        return await asyncio.shield(write.done)
