"""inspect ↔ frontend and decode: where a request would be routed now, and why. Nothing is sent or remembered."""

from msgspec import field

from components.wire.codec import Struct, message


@message("route-explain.v1")
class ExplainRoute(Struct):
    """`<frontend subject>.explain_route` with a text, or `<decode subject>.explain_route` with token ids.

    Answered by RouteExplained or Refused.
    """

    text: str = ""  # a user's message if `chat`, else a prompt
    chat: bool = True
    token_ids: bytes = b""  # int32[T]
    adapter: str = ""
    session: str = ""
    cache_salt: str = ""


class Candidate(Struct):
    instance_id: str
    cached_tokens: int  # of the prompt
    queued_tokens: int
    running: int  # requests
    used_pages: int
    total_pages: int
    breaker: str
    cost: float | None = None  # in the policy's unit; infinite: too full; None: no costs


@message("route-explained.v1")
class RouteExplained(Struct):
    policy: str
    token_ids: bytes  # int32[T]: the prompt
    why: str  # also why no instance was chosen
    chosen: str = ""  # instance id; "": none, or the decode that answers
    candidates: list[Candidate] = field(default_factory=list)  # the chosen one first
