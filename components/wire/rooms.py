"""decode, prefill ↔ bootstrap: a bootstrap room pairs one prefill and one decode for one KV transfer.

Decode names the room when it asks prefill to compute, and opens it at a replica of the bootstrap service once it has pages for
the KV. All that follows goes to that replica (`<bootstrap subject>.<verb>`): a room lives in that process's memory.
"""

from components.kv_transfer.layout import KvLayout
from components.wire.codec import Struct, message
from components.wire.dated import Dated


@message("room-open.v2")
class OpenRoom(Dated):
    """decode → bootstrap `.open`: the destination. Handed to prefill as PagesOffered; answered by RoomOk.

    Its deadline is for the last byte.
    """

    room: str  # random: no two are alike
    request_id: str
    prefill_id: str
    prefill_epoch: str
    decode_id: str
    decode_epoch: str
    pages: list[int]  # of the whole prompt, in order; decode's, of its page size, which prefill's may differ from
    num_cached_pages: int  # leading ones of these that decode already holds: nothing is sent for them
    aux_slot: int
    layout: KvLayout | None = None  # of decode's pages


@message("room-pages.v2")
class PagesOffered(Dated):
    """bootstrap → prefill, on `<prefill subject>.pages`; answered by RoomOk, or decode is told that the room failed."""

    request_id: str
    room: str
    bootstrap_id: str  # whose room it is
    decode_id: str
    decode_epoch: str
    pages: list[int]
    num_cached_pages: int
    aux_slot: int


@message("kv-coming.v1")
class KvComing(Struct):
    """prefill → decode, on `<decode subject>.kv_coming`: the last pages of this room follow at once. A hint: no answer."""

    room: str


@message("room-close.v2")
class CloseRooms(Struct):
    """prefill → bootstrap `.close`: these transfers are over, however they ended. Several at once: nobody waits for it."""

    rooms: list[str]


@message("rooms-closed.v1")
class RoomsClosed(Struct):
    """bootstrap → prefill: how many of them were still open."""

    count: int


@message("room-failed.v1")
class RoomFailed(Struct):
    """bootstrap or prefill → the other side, on `<subject>.room_failed`: this transfer will not complete."""

    request_id: str
    room: str
    error: str  # class name of `components.errors`
    cause: str


@message("room-ok.v1")
class RoomOk(Struct):
    """Done."""

    room: str
