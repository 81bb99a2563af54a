"""The bootstrap service: pairs one prefill and one decode instance in a room, and forwards decode's offer to prefill.

Each side itself checks compatibility, deadlines and lost peers: `PrefillChoice` and `PrefillClient` in decode,
`OutboundTransfer` and `PrefillService` in prefill. A backend checks the layout once more when it connects.
"""

import asyncio
import logging
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from components.discovery.registry import Registration
from components.errors import MalformedMessage, MeshError
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.process import subject_of
from components.wire.prefill import CloseRooms, OpenRoom, PagesOffered, RoomFailed, RoomOk, RoomsClosed

log = logging.getLogger(__name__)

FORWARD_TIMEOUT_S: Final = 10.0


class BootstrapService:
    def __init__(self, bus: Bus, namespace: str, registration: Registration, metrics: CollectorRegistry) -> None:
        self._bus = bus
        self._namespace = namespace
        self._instance_id = registration.instance_id
        self._deadlines_unix_ms: dict[str, int] = {}  # by open room
        self._forwarding: set[asyncio.Task[None]] = set()
        Gauge("open_rooms", "Bootstrap rooms open in this replica.", registry=metrics).set_function(lambda: len(self))

    def __len__(self) -> int:
        return len(self._deadlines_unix_ms)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("open", OpenRoom, self.open, span="bootstrap.open", immediate=True),
            Endpoint("close", CloseRooms, self.close, immediate=True),
        ]

    async def open(self, request: OpenRoom) -> RoomOk:
        """Raises: MalformedMessage, if the room is open."""
        if request.room in self._deadlines_unix_ms:
            raise MalformedMessage(f"room {request.room} is open already")
        self._deadlines_unix_ms[request.room] = request.deadline_unix_ms
        forwarding = asyncio.create_task(self._forward(request), name=f"forward {request.room}")
        self._forwarding.add(forwarding)
        forwarding.add_done_callback(self._forwarding.discard)
        return RoomOk(room=request.room)

    async def close(self, request: CloseRooms) -> RoomsClosed:
        return RoomsClosed(count=sum(map(self._close, request.rooms)))

    async def clean(self, every_s: float) -> None:
        """Forget rooms past their deadline, forever: a prefill instance that is gone closes none."""
        while True:
            await asyncio.sleep(every_s)
            expired = [room for room, deadline in self._deadlines_unix_ms.items() if deadline <= now_ms()]
            for room in expired:
                self._close(room)
            if expired:
                log.warning("rooms expired", extra={"count": len(expired), "open": len(self)})

    async def _forward(self, request: OpenRoom) -> None:
        """Forward the offer by a call with an answer: a lost message would cost a transfer's whole time."""
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
            if self._close(request.room):
                await self._notify_decode(request, exc)

    async def _notify_decode(self, request: OpenRoom, error: MeshError) -> None:
        failed = RoomFailed(
            request_id=request.request_id, room=request.room, error=type(error).__name__, cause=error.message
        )
        try:
            await self._bus.publish(f"{subject_of(self._namespace, 'decode', request.decode_id)}.room_failed", failed)
        except MeshError as exc:
            log.warning("decode was not notified", extra={"instance": request.decode_id, "cause": exc.message})

    def _close(self, room: str) -> bool:
        """Returns False if it was not open."""
        return self._deadlines_unix_ms.pop(room, None) is not None
