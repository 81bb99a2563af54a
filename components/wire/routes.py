"""inspect ↔ frontend and decode: what a request would be routed to now, and why. Nothing is sent, nothing remembered."""

from msgspec import field

from components.wire.codec import Struct, message


@message("route-explain.v1")
class ExplainRoute(Struct):
    """On `<frontend subject>.explain_route` with a text, or `<decode subject>.explain_route` with token ids.

    Answered by RouteExplained or Refused.
    """

    text: str = ""  # a user's message where `chat`, else a prompt
    chat: bool = True
    token_ids: bytes = b""  # int32[T]
    adapter: str = ""
    session: str = ""
    cache_salt: str = ""


class Candidate(Struct):
    """One of those that a choice was made among, as the router saw it then."""

    instance_id: str
    cached_tokens: int  # of the prompt
    queued_tokens: int
    running: int  # requests
    used_pages: int
    total_pages: int
    breaker: str
    cost: float | None = None  # in the policy's unit; infinite: too full; None: it reckons none


@message("route-explained.v1")
class RouteExplained(Struct):
    """The choice, and what it was made of."""

    policy: str
    token_ids: bytes  # int32[T]: the prompt
    why: str  # also why nobody was chosen
    chosen: str = ""  # instance id; "": nobody, or the one who was asked itself
    candidates: list[Candidate] = field(default_factory=list)  # the chosen one first
