"""Bootstrap rooms of one replica: pure state, no I/O. Each method returns the messages that now must be sent."""

from dataclasses import dataclass
from enum import StrEnum, auto
from secrets import randbits
from typing import Final, Literal

from components.errors import (
    BY_NAME,
    DeadlineExceeded,
    IncompatibleLayout,
    MalformedMessage,
    PeerLost,
    PrefillLost,
    TransferFailed,
)
from components.kv_transfer.layout import KvLayout, check_compatible
from components.lifecycle import Lifecycle
from components.wire.rooms import CloseRoom, OfferPages, OpenRoom, PagesOffered, RoomFailed, RoomOpened


class RoomState(StrEnum):
    """Life of a bootstrap room. Over means forgotten: a room is short-lived and its end is told, not kept."""

    OPEN = auto()  # prefill is known, decode's pages are not
    OFFERED = auto()  # decode's pages went to prefill
    CLOSED = auto()
    FAILED = auto()


S = RoomState
NEXT: Final = {
    S.OPEN: {S.OFFERED, S.CLOSED, S.FAILED},
    S.OFFERED: {S.CLOSED, S.FAILED},
}


@dataclass(slots=True)
class Room:
    """One pairing. A party is (instance id, epoch)."""

    name: str
    opening: OpenRoom
    deadline_unix_ms: int  # of its state
    lifecycle: Lifecycle[RoomState]

    @property
    def request_id(self) -> str:
        """Whose transfer it is for."""
        return self.opening.request_id

    @property
    def prefill(self) -> tuple[str, str]:
        """The party that sends."""
        return self.opening.prefill_id, self.opening.prefill_epoch

    @property
    def decode(self) -> tuple[str, str]:
        """The party that receives."""
        return self.opening.decode_id, self.opening.decode_epoch


@dataclass(frozen=True, slots=True)
class Note:
    """A message to one instance."""

    role: Literal["prefill", "decode"]
    instance_id: str
    message: PagesOffered | RoomFailed


class RoomBook:
    """All rooms that this replica opened."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._rooms: dict[str, Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def open(self, request: OpenRoom) -> RoomOpened:
        """A new room for this pair."""
        name = f"{self._replica_id}/{randbits(63):x}"
        self._rooms[name] = Room(
            name=name,
            opening=request,
            deadline_unix_ms=_earlier(request.offer_deadline_unix_ms, request.deadline_unix_ms),
            lifecycle=Lifecycle(f"room {name}", NEXT, S.OPEN),
        )
        return RoomOpened(room=name, stamp=randbits(62) + 1)

    def offer(self, request: OfferPages) -> list[Note]:
        """Decode's pages, on their way to prefill.

        Raises: TransferFailed, for a room that is over or not decode's; IncompatibleLayout.
        """
        room = self._rooms.get(request.room)
        if room is None:
            raise TransferFailed(f"room {request.room} is not open here: expired, failed, or this replica restarted")
        if room.decode != (request.decode_id, request.decode_epoch):
            raise TransferFailed(f"room {request.room} belongs to another decode instance")
        if room.lifecycle.state is not S.OPEN:
            raise MalformedMessage(f"room {request.room} has an offer already")
        if not 0 <= request.num_cached_pages <= len(request.pages):
            raise MalformedMessage(f"{request.num_cached_pages} cached pages of {len(request.pages)}")
        if room.opening.layout is not None and request.layout is not None:
            check_pair(room.opening.layout, request.layout)
        room.lifecycle.advance(S.OFFERED)
        room.deadline_unix_ms = _earlier(request.deadline_unix_ms, room.opening.deadline_unix_ms)
        offered = PagesOffered(
            request_id=room.request_id,
            room=room.name,
            decode_id=request.decode_id,
            decode_epoch=request.decode_epoch,
            pages=request.pages,
            num_cached_pages=request.num_cached_pages,
            aux_slot=request.aux_slot,
            deadline_unix_ms=request.deadline_unix_ms,
        )
        return [Note("prefill", room.prefill[0], offered)]

    def close(self, request: CloseRoom) -> list[Note]:
        """Prefill is through with the room; a failure is told to decode. A room long gone is fine."""
        room = self._rooms.get(request.room)
        if room is None:
            return []
        if request.error is None:
            self._end(room, S.CLOSED)
            return []
        error = request.error if request.error in BY_NAME else TransferFailed.__name__
        return self._fail(room, error, request.cause, tell_decode=True)

    def instance_gone(self, instance_id: str, epoch: str) -> list[Note]:
        """etcd says so: the other side of each of its rooms hears at once."""
        notes = []
        for room in list(self._rooms.values()):
            if room.prefill == (instance_id, epoch):
                notes += self._fail(room, PrefillLost.__name__, f"prefill {instance_id} is gone", tell_decode=True)
            elif room.decode == (instance_id, epoch):
                notes += self._fail(room, PeerLost.__name__, f"decode {instance_id} is gone", tell_prefill=True)
        return notes

    def expire(self, now_unix_ms: int) -> list[Note]:
        """Rooms past their deadline fail on both sides."""
        notes = []
        for room in [r for r in self._rooms.values() if r.deadline_unix_ms <= now_unix_ms]:
            late = "decode did not offer its pages" if room.lifecycle.state is S.OPEN else "the transfer did not end"
            cause = f"{late} in time"
            notes += self._fail(room, DeadlineExceeded.__name__, cause, tell_prefill=True, tell_decode=True)
        return notes

    def _fail(
        self, room: Room, error: str, cause: str, *, tell_prefill: bool = False, tell_decode: bool = False
    ) -> list[Note]:
        self._end(room, S.FAILED)
        failed = RoomFailed(request_id=room.request_id, room=room.name, error=error, cause=cause)
        prefill = [Note("prefill", room.prefill[0], failed)] if tell_prefill else []
        decode = [Note("decode", room.decode[0], failed)] if tell_decode else []
        return prefill + decode

    def _end(self, room: Room, state: RoomState) -> None:
        room.lifecycle.advance(state)
        del self._rooms[room.name]


def check_pair(prefill: KvLayout, decode: KvLayout) -> None:
    """Raises: IncompatibleLayout, naming each field that does not fit with both values."""
    try:
        check_compatible(prefill, decode)
    except IncompatibleLayout as exc:
        raise IncompatibleLayout(
            f"a room for two that do not fit, prefill here and decode there: {exc.message}"
        ) from exc


def _earlier(deadline: int | None, last: int) -> int:
    return last if deadline is None else min(deadline, last)
