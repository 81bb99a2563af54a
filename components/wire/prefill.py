"""decode ↔ prefill: a prompt to compute, and the end of its transfer."""

from components.wire.codec import Dated, Struct, message
from components.wire.layout import KvLayout
from components.wire.sampling import SamplingParams


@message("prefill.v6")
class PrefillRequest(Dated):
    """The deadline is for the whole transfer."""

    request_id: str
    epoch: str
    decode_id: str
    decode_epoch: str
    room: str
    stamp: int  # random uint63 for the aux slot
    token_ids: bytes  # int32[T]
    sampling: SamplingParams  # for the first token
    num_generated: int = 0  # of `token_ids`, after a move
    cache_salt: str = ""
    priority: int = 0
    adapter: str = ""
    adapter_identity: str = ""  # hash of its weights; only older versions check it
    layout: KvLayout | None = None  # likewise
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


@message("quiet.v1")
class Quiet(Struct):
    """No further write follows: decode may reuse the pages."""

    request_id: str
