"""decode ↔ prefill: a prompt to compute, and the end of a transfer."""

from components.kv_transfer.layout import KvLayout
from components.wire.codec import Struct, message
from components.wire.dated import Dated
from components.wire.sampling import Sampling


@message("prefill.v5")
class PrefillRequest(Dated):
    """decode → prefill, on `<prefill subject>.prefill`; answered by PrefillAccepted or Refused.

    Its deadline is for everything: computing, pairing and sending.
    """

    request_id: str
    epoch: str  # of the prefill instance addressed
    decode_id: str
    decode_epoch: str
    room: str  # where decode's pages will be offered
    stamp: int  # uint63, random: the aux slot carries it when everything has landed
    token_ids: bytes  # int32[T], the whole prompt
    sampling: Sampling  # as decode got it: the first token is drawn here
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    adapter: str = ""  # of the instance's record, where it stands with the identity that decode knows
    adapter_identity: str = ""  # of the weights that decode has compared its own with: those of this record
    layout: KvLayout | None = None  # of decode's pages: where ours do not fit, nothing is computed
    verify_kv: bool = False  # a checksum for each page sent goes into the aux slot


@message("prefill-accepted.v2")
class PrefillAccepted(Struct):
    """prefill → decode: the prompt is being computed; open the room when you have pages for it."""

    request_id: str
    number: int = 0  # heartbeats with `accepted` from here on count this prompt; 0: they do not say


@message("quiesce.v1")
class Quiesce(Struct):
    """decode → prefill, on `<prefill subject>.quiesce`: stop this request, answer when no write of it is in flight."""

    request_id: str
    cause: str
    cancelled: bool = False  # its client has gone: nothing has failed


@message("quiet.v1")
class Quiet(Struct):
    """prefill → decode: no write of this request is in flight and none will be posted; its pages may be used again."""

    request_id: str
