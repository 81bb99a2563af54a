"""Writes to one peer with Mooncake, with an engine and a thread of its own.

A stopped peer that resumes late must not receive writes into reused pages; only ending the engine prevents that. Calls may
block for a minute on such a peer.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from components.errors import DeadlineExceeded, MeshError, TransferFailed
from components.kv_transfer.backend import check_deadline
from components.kv_transfer.mooncake_api import prepare_end, start_engine
from components.kv_transfer.own_thread import OwnThread
from components.wire.instances import KvEndpoint

log = logging.getLogger(__name__)

IN_FLIGHT: Final = 64  # pieces; Mooncake queues 1,024 per peer and fails the rest
POLL_S: Final = 0.0002
LANDED: Final = 1
FAILED: Final = -1


@dataclass(frozen=True, slots=True)
class Piece:
    source: int  # addresses
    target: int
    num_bytes: int


@dataclass(slots=True)
class _Write:
    pieces: list[Piece]
    deadline_unix_ms: int
    done: asyncio.Future[int]
    num_open: int  # unfinished pieces
    failure: MeshError | None = None


class MooncakePeer:
    def __init__(self, endpoint: KvEndpoint, segment: str, host: str) -> None:
        self.endpoint = endpoint
        self._segment = segment
        self._host = host
        self._engine: Any = None  # used only by the thread, as are the next two
        self._waiting: deque[tuple[_Write, Piece]] = deque()
        self._in_flight: dict[int, _Write] = {}  # by Mooncake's batch id
        self._thread = OwnThread("mooncake", self._poll)
        self._thread.start()
        self._opening = asyncio.ensure_future(self._thread.ask(self._open))

    async def opened(self) -> None:
        await asyncio.shield(self._opening)

    async def write(self, pieces: list[Piece], deadline_unix_ms: int) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._thread.post(lambda: self._add(_Write(pieces, deadline_unix_ms, done, len(pieces))))
        return await asyncio.shield(done)

    async def stop(self) -> None:
        self._thread.post(self._close)
        await self._thread.stop()

    # The rest runs on the thread.

    def _open(self) -> None:
        self._engine = start_engine(self._host)
        # an empty write makes Mooncake connect
        batch = self._begin(Piece(0, 0, 0))
        if not batch or self._engine.transfer_check_status(batch) != LANDED:
            raise TransferFailed(f"no Mooncake engine answers at {self._segment!r}")

    def _add(self, write: _Write) -> None:
        self._waiting.extend((write, piece) for piece in write.pieces)
        if not write.pieces:
            self._thread.settle(write.done, 0)

    def _poll(self) -> float | None:
        for batch, write in list(self._in_flight.items()):
            status = self._engine.transfer_check_status(batch)
            if status in {LANDED, FAILED}:
                del self._in_flight[batch]
                self._ended(write, None if status == LANDED else self._lost("Mooncake reports the write as failed"))
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            write, piece = self._waiting.popleft()
            if write.failure:
                self._ended(write, write.failure)
                continue
            try:
                check_deadline(write.deadline_unix_ms)
            except DeadlineExceeded as exc:
                self._ended(write, exc)
                continue
            if batch := self._begin(piece):
                self._in_flight[batch] = write
            else:
                self._ended(write, self._lost("Mooncake refused the write"))
        return POLL_S if self._in_flight else None

    def _begin(self, piece: Piece) -> int:
        """Returns Mooncake's batch id; 0: refused."""
        try:
            return int(self._engine.transfer_submit_write(self._segment, piece.source, piece.target, piece.num_bytes))
        except (TypeError, RuntimeError) as exc:  # such as an invalid address
            log.warning(
                "KV write not posted", extra={"peer": self.endpoint.agent, "cause": str(exc).partition("\n")[0]}
            )
            return 0

    def _lost(self, cause: str) -> TransferFailed:
        return TransferFailed(f"{cause}; the peer {self.endpoint.agent} is lost")

    def _ended(self, write: _Write, failure: MeshError | None) -> None:
        write.failure = write.failure or failure
        write.num_open -= 1
        if write.num_open:
            return
        if write.failure:
            self._thread.settle(write.done, error=write.failure)
        else:
            self._thread.settle(write.done, sum(piece.num_bytes for piece in write.pieces))

    def _close(self) -> None:
        writes = [*self._in_flight.values(), *(write for write, _ in self._waiting)]
        if self._engine is not None:
            prepare_end(self._engine)
        self._engine = None  # its destructor closes the sockets
        self._in_flight.clear()
        self._waiting.clear()
        for write in writes:
            self._thread.settle(write.done, error=TransferFailed(f"{self.endpoint.agent} is gone"))
