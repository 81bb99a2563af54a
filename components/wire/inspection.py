"""inspect ↔ services: a worker's profile, fetched in parts, and where a request would be routed now."""

from msgspec import field

from components.wire.codec import Struct, message


@message("profile-start.v1")
class StartProfile(Struct):
    """On `<worker subject>.profile`; answered at once by ProfileStarted."""

    seconds: float


@message("profile-started.v1")
class ProfileStarted(Struct):
    profile_id: str


@message("profile-fetch.v1")
class FetchProfile(Struct):
    """On `<worker subject>.profile_part`; answered by ProfilePart."""

    profile_id: str
    offset: int


@message("profile-part.v1")
class ProfilePart(Struct):
    data: bytes  # gzip members, each a Chrome trace of some of the time
    size_bytes: int | None = None  # of the file; None: not complete
    seconds: float = 0.0  # recorded
    steps: int = 0  # engine steps with work


@message("route-explain.v1")
class ExplainRoute(Struct):
    """On `<subject>.explain_route` of a frontend, with a text, or of decode, with token ids."""

    text: str = ""  # a user's message, or a prompt without `chat`
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
    cost: float | None = None  # in the policy's unit; infinite: excluded


@message("route-explained.v1")
class RouteExplained(Struct):
    policy: str
    token_ids: bytes  # int32[T]
    why: str  # or why no instance was chosen
    chosen: str = ""  # instance id; "": none
    candidates: list[Candidate] = field(default_factory=list)  # the chosen one first
