"""prefill, decode ↔ bootstrap: a bootstrap room pairs one prefill and one decode for one KV transfer.

All go to the replica that opened the room (`<bootstrap subject>.<verb>`): a room lives in that process's memory.
"""

from components.kv_transfer.layout import KvLayout
from components.wire.codec import message


@message("room-open.v1")
class OpenRoom:
    """prefill → bootstrap `.open`; answered by RoomOpened."""

    request_id: str
    prefill_id: str
    prefill_epoch: str
    decode_id: str
    decode_epoch: str
    deadline_unix_ms: int  # for everything
    offer_deadline_unix_ms: int | None = None  # for decode's pages
    layout: KvLayout | None = None  # of prefill's pages


@message("room-opened.v1")
class RoomOpened:
    """bootstrap → prefill."""

    room: str
    stamp: int  # uint63, random


@message("room-offer.v1")
class OfferPages:
    """decode → bootstrap `.offer`: the destination. Delivered to prefill as PagesOffered; answered by RoomOk."""

    room: str
    decode_id: str
    decode_epoch: str
    pages: list[int]  # of the whole prompt, in order; decode's, of its page size, which prefill's may differ from
    num_cached_pages: int  # leading ones of these that decode already holds: nothing is sent for them
    aux_slot: int
    deadline_unix_ms: int | None = None  # for the last byte; None: the room's
    layout: KvLayout | None = None  # of decode's pages


@message("room-pages.v1")
class PagesOffered:
    """bootstrap → prefill, on `<prefill subject>.pages`."""

    request_id: str
    room: str
    decode_id: str
    decode_epoch: str
    pages: list[int]
    num_cached_pages: int
    aux_slot: int
    deadline_unix_ms: int | None = None


@message("kv-coming.v1")
class KvComing:
    """prefill → decode, on `<decode subject>.kv_coming`: the last pages of this room follow at once. A hint: no answer."""

    room: str


@message("room-close.v1")
class CloseRoom:
    """prefill → bootstrap `.close`: everything was delivered, or never will be: then `error` and `cause` are set."""

    room: str
    error: str | None = None  # class name of `components.errors`
    cause: str = ""


@message("room-failed.v1")
class RoomFailed:
    """bootstrap → the other side, on `<subject>.room_failed`: this transfer will not complete."""

    request_id: str
    room: str
    error: str
    cause: str


@message("room-ok.v1")
class RoomOk:
    """bootstrap → caller: done."""

    room: str
