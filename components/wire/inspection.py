"""inspect ↔ services: a worker's profile, fetched in parts, and where a request would be routed now."""

from msgspec import field

from components.wire.codec import Struct, message


@message("profile-start.v1")
class StartProfile(Struct):
    """inspect → worker `<subject>.profile`; answered by ProfileStarted at once, or refused."""

    seconds: float


@message("profile-started.v1")
class ProfileStarted(Struct):
    profile_id: str


@message("profile-fetch.v1")
class FetchProfile(Struct):
    """inspect → worker `<subject>.profile_part`; answered by ProfilePart or an error."""

    profile_id: str
    offset: int  # of the first byte


@message("profile-part.v1")
class ProfilePart(Struct):
    data: bytes  # concatenated gzip members, each a Chrome trace of a piece of the time
    size_bytes: int | None = None  # of the whole file; None: still recording or writing
    seconds: float = 0.0  # recorded
    steps: int = 0  # of the engine that computed something


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
