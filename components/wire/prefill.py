"""decode ↔ prefill: a prompt to compute, and the end of its transfer."""

from components.wire.codec import Dated, Struct, message
from components.wire.layout import KvLayout
from components.wire.sampling import SamplingParams


@message("prefill.v6")
class PrefillRequest(Dated):
    """decode → prefill `.prefill`; answered by PrefillAccepted. The deadline is for the whole transfer."""

    request_id: str
    epoch: str  # of prefill
    decode_id: str
    decode_epoch: str
    room: str  # of decode's offer
    stamp: int  # random uint63 for the aux slot
    token_ids: bytes  # int32[T]
    sampling: SamplingParams  # for the first token
    num_generated: int = 0  # last token ids that belong to the answer, after a move
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    adapter: str = ""
    adapter_identity: str = ""  # hash of its weights; only older versions check it
    layout: KvLayout | None = None  # of decode's pages; only older versions check it
    verify_kv: bool = False  # with checksums in the aux slot


@message("prefill-accepted.v2")
class PrefillAccepted(Struct):
    request_id: str
    number: int = 0  # heartbeats with this `accepted` or more cover the prompt; 0: none does


@message("quiesce.v1")
class Quiesce(Struct):
    """decode → prefill `.quiesce`: stop; answered by Quiet when no write is in flight."""

    request_id: str
    cause: str
    cancelled: bool = False  # by the client


@message("quiet.v1")
class Quiet(Struct):
    """No write is in flight and none will be posted: decode may reuse the pages."""

    request_id: str
