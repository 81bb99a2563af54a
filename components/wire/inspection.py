"""inspect ↔ services: profiles, and explanations of routing."""

from msgspec import field

from components.wire.codec import Struct, message


@message("profile-start.v1")
class StartProfile(Struct):
    seconds: float


@message("profile-started.v1")
class ProfileStarted(Struct):
    profile_id: str


@message("profile-fetch.v1")
class FetchProfile(Struct):
    profile_id: str
    offset: int


@message("profile-part.v1")
class ProfilePart(Struct):
    data: bytes  # gzip members, each a Chrome trace
    size_bytes: int | None = None  # of the file; None: not complete
    seconds: float = 0.0
    steps: int = 0


@message("route-explain.v1")
class ExplainRoute(Struct):
    """A frontend needs a text, decode token ids."""

    text: str = ""  # without `chat`, a prompt
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
    why: str  # also without a choice
    chosen: str = ""  # instance id
    candidates: list[Candidate] = field(default_factory=list)  # the chosen one first
