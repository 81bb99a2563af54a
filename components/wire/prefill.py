"""decode ↔ prefill: a prompt to compute, and the end of its transfer."""

from components.wire.codec import Dated, Struct, message
from components.wire.layout import KvLayout
from components.wire.sampling import Sampling


@message("prefill.v5")
class PrefillRequest(Dated):
    """decode → prefill `.prefill`; answered by PrefillAccepted or Refused. The deadline is for the whole transfer."""

    request_id: str
    epoch: str  # of the prefill instance
    decode_id: str
    decode_epoch: str
    room: str  # where decode's pages will be offered
    stamp: int  # uint63, random: prefill writes it into the aux slot after the last page
    token_ids: bytes  # int32[T], the whole prompt
    sampling: Sampling  # prefill draws the first token
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    adapter: str = ""  # a name in prefill's record
    adapter_identity: str = ""  # hash of its weights in that record; older prefill instances check it
    layout: KvLayout | None = None  # of decode's pages; older prefill instances check it
    verify_kv: bool = False  # ask for checksums in the aux slot


@message("prefill-accepted.v2")
class PrefillAccepted(Struct):
    request_id: str
    number: int = 0  # heartbeats whose `accepted` is as high count this prompt; 0: unknown


@message("quiesce.v1")
class Quiesce(Struct):
    """decode → prefill `.quiesce`: stop this request; answered by Quiet when no write of it is in flight."""

    request_id: str
    cause: str
    cancelled: bool = False  # by its client: no failure


@message("quiet.v1")
class Quiet(Struct):
    """prefill → decode: no write is in flight and none will be posted; decode may reuse the pages."""

    request_id: str
