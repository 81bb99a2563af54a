"""decode, prefill ↔ bootstrap: bootstrap rooms, each in one replica's memory."""

from components.wire.codec import Dated, Struct, message
from components.wire.layout import KvLayout


@message("room-open.v2")
class OpenRoom(Dated):
    """decode → bootstrap. The deadline is for the whole transfer."""

    room: str
    request_id: str
    prefill_id: str
    prefill_epoch: str
    decode_id: str
    decode_epoch: str
    pages: list[int]  # the whole prompt's, in order
    num_cached_pages: int  # leading pages, not sent
    aux_slot: int
    layout: KvLayout | None = None  # only older versions check it


@message("room-pages.v2")
class PagesOffered(Dated):
    """bootstrap → prefill: decode's offer."""

    request_id: str
    room: str
    bootstrap_id: str
    decode_id: str
    decode_epoch: str
    pages: list[int]
    num_cached_pages: int
    aux_slot: int


@message("kv-coming.v1")
class KvComing(Struct):
    """prefill → decode, unanswered: the last pages follow at once."""

    room: str


@message("room-close.v2")
class CloseRooms(Struct):
    rooms: list[str]


@message("rooms-closed.v1")
class RoomsClosed(Struct):
    count: int


@message("room-failed.v1")
class RoomFailed(Struct):
    """bootstrap or prefill → decode: the transfer will not complete."""

    request_id: str
    room: str
    error: str
    cause: str


@message("room-ok.v1")
class RoomOk(Struct):
    room: str
