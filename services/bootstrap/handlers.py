"""What the bootstrap service answers, and what it tells of its own accord."""

import asyncio
import logging
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from components.discovery.registry import Registration, Registry
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.deadline import now_ms
from components.messaging.service import Endpoint
from components.process import subject_of
from components.wire.instances import InstanceRecord
from components.wire.rooms import CloseRooms, OpenRoom, PagesOffered, RoomOk, RoomsClosed
from services.bootstrap.rooms import Note, RoomBook

log = logging.getLogger(__name__)

HAND_OVER_TIMEOUT_S: Final = 10.0


class BootstrapService:
    """The rooms of this replica, and the messages around them."""

    def __init__(
        self, bus: Bus, namespace: str, registration: Registration, registry: Registry, metrics: CollectorRegistry
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._registry = registry
        self._rooms = RoomBook(registration.instance_id)
        self._told: asyncio.Queue[Note] = asyncio.Queue()
        self._handing_over: set[asyncio.Task[None]] = set()
        Gauge("open_rooms", "Bootstrap rooms open in this replica.", registry=metrics).set_function(
            lambda: len(self._rooms)
        )
        registry.book.subscribe(self._changed)

    def endpoints(self) -> list[Endpoint]:
        """The calls of a room's life."""
        return [
            Endpoint("open", OpenRoom, self.open, span="bootstrap.open", immediate=True),
            Endpoint("close", CloseRooms, self.close, immediate=True),
        ]

    async def open(self, request: OpenRoom) -> RoomOk:
        """A new room, and decode's pages handed to prefill. Raises: MalformedMessage, IncompatibleLayout."""
        prefill = self._registry.book.find(request.prefill_id, request.prefill_epoch)
        layout = None if prefill is None or prefill.kv is None else prefill.kv.layout
        offered = self._rooms.open(request, layout, sent_unix_ms=now_ms())
        handing_over = asyncio.create_task(self._hand_over(request.room, offered), name=f"hand over {request.room}")
        self._handing_over.add(handing_over)
        handing_over.add_done_callback(self._handing_over.discard)
        return RoomOk(room=request.room)

    async def _hand_over(self, room: str, offered: Note) -> None:
        """Give decode's pages to prefill. It is a call, because a lost message would cost the whole time of a transfer."""
        try:
            await self._bus.call(self._subject(offered), offered.message, RoomOk, timeout_s=HAND_OVER_TIMEOUT_S)
        except MeshError as exc:
            await self._tell(self._rooms.refused(room, exc))

    async def close(self, request: CloseRooms) -> RoomsClosed:
        """The end of rooms."""
        return RoomsClosed(count=sum(map(self._rooms.close, request.rooms)))

    async def clean(self, every_s: float) -> None:
        """Fail expired rooms, for ever."""
        while True:
            await asyncio.sleep(every_s)
            notes = self._rooms.expire(now_ms())
            if notes:
                log.warning("rooms expired", extra={"count": len(notes) // 2, "open": len(self._rooms)})
            await self._tell(notes)

    async def tell(self) -> None:
        """Send what etcd's news made necessary, for ever."""
        while True:
            await self._tell([await self._told.get()])

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is not None and was.role in ("prefill", "decode") and (now is None or now.epoch != was.epoch):
            for note in self._rooms.instance_gone(was.instance_id, was.epoch):
                self._told.put_nowait(note)

    async def _tell(self, notes: list[Note]) -> None:
        for note in notes:
            try:
                await self._bus.publish(self._subject(note), note.message)
            except MeshError as exc:
                log.warning("not told", extra={"instance": note.instance_id, "cause": exc.message})

    def _subject(self, note: Note) -> str:
        verb = "pages" if isinstance(note.message, PagesOffered) else "room_failed"
        return f"{subject_of(self._namespace, note.role, note.instance_id)}.{verb}"
