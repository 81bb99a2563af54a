"""Bootstrap rooms of one replica: pure state, no I/O. Each method returns the messages that now must be sent."""

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final, Literal

from components.errors import DeadlineExceeded, IncompatibleLayout, MalformedMessage, MeshError, PeerLost, PrefillLost
from components.kv_transfer.layout import KvLayout, check_compatible
from components.lifecycle import Lifecycle
from components.wire.rooms import OpenRoom, PagesOffered, RoomFailed


class RoomState(StrEnum):
    """Life of a bootstrap room. Over means forgotten: a room is short-lived and its end is told, not kept."""

    OPEN = auto()  # decode's pages went to prefill
    CLOSED = auto()  # prefill says that the transfer is over
    FAILED = auto()  # it is too late, or one of both is gone


S = RoomState
NEXT: Final = {S.OPEN: {S.CLOSED, S.FAILED}}

Party = tuple[str, str]  # instance id, epoch


@dataclass(slots=True)
class Room:
    """One pairing."""

    name: str
    request_id: str  # whose transfer it is for
    prefill: Party  # who sends
    decode: Party  # who receives
    deadline_unix_ms: int
    lifecycle: Lifecycle[RoomState]


@dataclass(frozen=True, slots=True)
class Note:
    """A message to one instance."""

    role: Literal["prefill", "decode"]
    instance_id: str
    message: PagesOffered | RoomFailed


class RoomBook:
    """All rooms that were opened at this replica."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._rooms: dict[str, Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def open(self, request: OpenRoom, prefill: KvLayout | None = None, *, sent_unix_ms: int = 0) -> Note:
        """A room for this pair, and decode's pages on their way to prefill.

        `prefill` is the layout of prefill's pages, where it is known. Raises: MalformedMessage, IncompatibleLayout.
        """
        if request.room in self._rooms:
            raise MalformedMessage(f"room {request.room} is open already")
        if not 0 <= request.num_cached_pages <= len(request.pages):
            raise MalformedMessage(f"{request.num_cached_pages} cached pages of {len(request.pages)}")
        if prefill is not None and request.layout is not None:
            check_pair(prefill, request.layout)
        self._rooms[request.room] = Room(
            name=request.room,
            request_id=request.request_id,
            prefill=(request.prefill_id, request.prefill_epoch),
            decode=(request.decode_id, request.decode_epoch),
            deadline_unix_ms=request.deadline_unix_ms,
            lifecycle=Lifecycle(f"room {request.room}", NEXT, S.OPEN),
        )
        offered = PagesOffered(
            request_id=request.request_id,
            room=request.room,
            bootstrap_id=self._replica_id,
            sender=self._replica_id,
            sent_unix_ms=sent_unix_ms,
            decode_id=request.decode_id,
            decode_epoch=request.decode_epoch,
            pages=request.pages,
            num_cached_pages=request.num_cached_pages,
            aux_slot=request.aux_slot,
            deadline_unix_ms=request.deadline_unix_ms,
        )
        return Note("prefill", request.prefill_id, offered)

    def close(self, name: str) -> bool:
        """Prefill is through with the room. False: it was gone already, which is fine."""
        room = self._rooms.get(name)
        if room is None:
            return False
        self._end(room, S.CLOSED)
        return True

    def refused(self, name: str, error: MeshError) -> list[Note]:
        """Prefill did not take decode's pages: decode computes the prompt itself."""
        room = self._rooms.get(name)
        return [] if room is None else self._fail(room, type(error).__name__, error.message, tell_decode=True)

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
            cause = "the transfer did not end in time"
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
