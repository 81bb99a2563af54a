"""The bootstrap service: pairs one prefill and one decode instance in a room, and forwards decode's offer to prefill.

Each side itself checks compatibility, deadlines and lost peers: `PrefillChoice` and `PrefillClient` in decode,
`OutboundTransfer` and `PrefillService` in prefill.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter

from components.aio import BackgroundTasks
from components.discovery.registry import Registration
from components.errors import MalformedMessage, MeshError, Overloaded
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.messaging.failed_rooms import report_room_failed
from components.process import subject_of
from components.telemetry.figures import Figures
from components.telemetry.on_demand import OnDemand
from components.wire.prefill import CloseRooms, OpenRoom, PagesOffered, RoomOk, RoomsClosed
from components.wire.status import RoomStatus

log = logging.getLogger(__name__)

FORWARD_TIMEOUT_S: Final = 10.0
LEAVE_S: Final = 5.0  # less than the supervisor waits before SIGKILL


class _Room(NamedTuple):
    request_id: str
    prefill_id: str
    deadline_unix_ms: int
    opened_s: float  # monotonic


class BootstrapService:
    def __init__(self, bus: Bus, namespace: str, registration: Registration, metrics: CollectorRegistry) -> None:
        self._bus = bus
        self._namespace = namespace
        self._instance_id = registration.instance_id
        self.draining = False
        self._open: dict[str, _Room] = {}  # by room
        self._forwarding = BackgroundTasks()
        OnDemand(metrics).gauge("kvmesh_open_rooms", "Bootstrap rooms open in this replica.", lambda: len(self))
        self._ended = Counter(
            "kvmesh_rooms_ended",
            "Rooms that prefill closed, that expired, or that failed because prefill refused the offer.",
            ["how"],
            registry=metrics,
        )
        for how in ("closed", "expired", "failed"):
            self._ended.labels(how)

    def __len__(self) -> int:
        return len(self._open)

    def show(self, figures: Figures) -> None:
        figures.rooms = self.rooms

    def rooms(self) -> list[RoomStatus]:
        now_s = time.monotonic()
        return [
            RoomStatus(
                room=room, request_id=each.request_id, state="open", age_s=now_s - each.opened_s, peer=each.prefill_id
            )
            for room, each in self._open.items()
        ]

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("open", OpenRoom, self.open, span="bootstrap.open", runs_inline=True),
            Endpoint("close", CloseRooms, self.close, runs_inline=True),
        ]

    async def open(self, request: OpenRoom) -> RoomOk:
        """Raises: MalformedMessage, if the room is open; Overloaded, while this replica drains."""
        if self.draining:
            raise Overloaded("this bootstrap replica is draining")
        if request.room in self._open:
            raise MalformedMessage(f"room {request.room} is open already")
        self._open[request.room] = _Room(
            request.request_id, request.prefill_id, request.deadline_unix_ms, time.monotonic()
        )
        self._forwarding.start(self._forward(request), f"forward {request.room}")
        return RoomOk(room=request.room)

    async def leave(self) -> None:
        """Refuse new rooms, and wait for the offers that are being forwarded."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._forwarding.drain()

    async def close(self, request: CloseRooms) -> RoomsClosed:
        return RoomsClosed(count=sum(self._close(room, "closed") for room in request.rooms))

    async def clean(self, every_s: float) -> None:
        """Remove expired rooms every `every_s` seconds, because a prefill instance that is gone does not close its rooms."""
        while True:
            await asyncio.sleep(every_s)
            expired = [room for room, each in self._open.items() if each.deadline_unix_ms <= now_ms()]
            for room in expired:
                self._close(room, "expired")
            if expired:
                log.warning(
                    "rooms expired: prefill did not close them", extra={"count": len(expired), "open": len(self)}
                )

    async def _forward(self, request: OpenRoom) -> None:
        """Forward the offer as a call with an answer. If it were lost unnoticed, the transfer would time out."""
        offer = PagesOffered(
            request_id=request.request_id,
            room=request.room,
            bootstrap_id=self._instance_id,
            sender=self._instance_id,
            sent_unix_ms=now_ms(),
            decode_id=request.decode_id,
            decode_epoch=request.decode_epoch,
            pages=request.pages,
            num_cached_pages=request.num_cached_pages,
            aux_slot=request.aux_slot,
            deadline_unix_ms=request.deadline_unix_ms,
        )
        prefill = subject_of(self._namespace, "prefill", request.prefill_id)
        try:
            await self._bus.call(f"{prefill}.pages", offer, RoomOk, timeout_s=FORWARD_TIMEOUT_S)
        except MeshError as exc:
            if self._close(request.room, "failed"):
                decode = subject_of(self._namespace, "decode", request.decode_id)
                await report_room_failed(self._bus, decode, request.request_id, request.room, exc)

    def _close(self, room: str, how: str) -> bool:
        """Returns False if it was not open."""
        if self._open.pop(room, None) is None:
            return False
        self._ended.labels(how).inc()
        return True
