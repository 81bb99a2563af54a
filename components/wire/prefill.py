"""A prompt that prefill computes for decode, and the transfer of its pages.

decode, prefill ↔ bootstrap: bootstrap rooms, each in one replica's memory.
"""

from components.wire.codec import Dated, Id, Struct, message
from components.wire.sampling import SamplingParams


@message("prefill.v6")
class PrefillRequest(Dated):
    """The deadline is for the whole transfer."""

    sent_by = "decode"

    request_id: str
    epoch: str
    decode_id: Id
    decode_epoch: str
    room: str
    stamp: int  # random uint63 for the aux slot
    token_ids: bytes  # int32[T]
    sampling: SamplingParams  # for the first token
    num_generated: int = 0  # of `token_ids`, after a move
    cache_salt: str = ""
    priority: int = 0
    adapter: str = ""
    verify_kv: bool = False  # by checksums in the aux slot


@message("prefill-accepted.v2")
class PrefillAccepted(Struct):
    request_id: str
    number: int = 0  # as in GenerateAccepted


@message("quiesce.v1")
class Quiesce(Struct):
    """Stop the transfer. Prefill answers when no write is in flight."""

    request_id: str
    cause: str
    cancelled: bool = False
    epoch: str = ""  # of the asked process, as no other can answer; empty: not checked


@message("quiet.v1")
class Quiet(Struct):
    """No further write follows: decode may reuse the pages."""

    request_id: str


@message("room-open.v2")
class OpenRoom(Dated):
    """decode → bootstrap. The deadline is for the whole transfer."""

    sent_by = "decode"
    fences_writes = True

    room: str
    request_id: str
    prefill_id: Id
    prefill_epoch: str
    decode_id: Id
    decode_epoch: str
    pages: list[int]  # the whole prompt's, in order
    num_cached_pages: int  # leading pages, not sent
    aux_slot: int


@message("room-pages.v2")
class PagesOffered(Dated):
    """bootstrap → prefill: decode's offer."""

    sent_by = "bootstrap"
    fences_writes = True

    request_id: str
    room: str
    bootstrap_id: str
    decode_id: Id
    decode_epoch: str
    pages: list[int]
    num_cached_pages: int
    aux_slot: int


@message("kv-coming.v1")
class KvComing(Struct):
    """prefill → decode, unanswered: the last pages follow at once.

    Decode may send the first token to the client before the pages arrive.
    """

    room: str
    request_id: str = ""
    first_token: int | None = None
    num_cached_tokens: int = 0  # of the prompt, in prefill's prefix cache


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
    stamp: int = 0  # of PrefillRequest: prefill writes no more. 0: it may still write


@message("room-ok.v1")
class RoomOk(Struct):
    room: str
