"""inspect ↔ worker: a profile, recorded there and fetched in parts, since the two may be on different machines."""

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
