"""decode, prefill ↔ bootstrap: bootstrap rooms, each in the memory of one replica."""

from components.wire.codec import Dated, Struct, message
from components.wire.layout import KvLayout


@message("room-open.v2")
class OpenRoom(Dated):
    """decode → bootstrap `.open`; answered by RoomOk. The deadline is for the whole transfer."""

    room: str
    request_id: str
    prefill_id: str
    prefill_epoch: str
    decode_id: str
    decode_epoch: str
    pages: list[int]  # of the whole prompt, in order
    num_cached_pages: int  # leading pages, which are not sent
    aux_slot: int
    layout: KvLayout | None = None  # of decode's pages; only older versions check it


@message("room-pages.v2")
class PagesOffered(Dated):
    """bootstrap → prefill `.pages`: decode's offer; answered by RoomOk, or RoomFailed to decode."""

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
    """prefill → decode `.kv_coming`: the last pages follow at once. No answer."""

    room: str


@message("room-close.v2")
class CloseRooms(Struct):
    """prefill → bootstrap `.close`: these transfers have ended."""

    rooms: list[str]


@message("rooms-closed.v1")
class RoomsClosed(Struct):
    count: int


@message("room-failed.v1")
class RoomFailed(Struct):
    """bootstrap or prefill → decode `.room_failed`: this transfer will not complete."""

    request_id: str
    room: str
    error: str  # class name of `components.errors`
    cause: str


@message("room-ok.v1")
class RoomOk(Struct):
    room: str
