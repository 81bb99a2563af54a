"""inspect ↔ prefill, decode: a profile of one worker, recorded there and fetched in parts.

Nothing of it is a file path: the two may be on different machines.
"""

from components.wire.codec import Struct, message


@message("profile-start.v1")
class StartProfile(Struct):
    """inspect → worker `<subject>.profile`; answered by ProfileStarted at once, or refused."""

    seconds: float


@message("profile-started.v1")
class ProfileStarted(Struct):
    """worker → inspect: it is being recorded."""

    profile_id: str


@message("profile-fetch.v1")
class FetchProfile(Struct):
    """inspect → worker `<subject>.profile_part`; answered by ProfilePart, or by why there is no profile."""

    profile_id: str
    offset: int  # of the first byte wanted


@message("profile-part.v1")
class ProfilePart(Struct):
    """worker → inspect: some bytes from the offset on."""

    data: bytes  # of gzip members, one after the other: each a Chrome trace of a piece of the time
    size_bytes: int | None = None  # of the whole file; None: it is being recorded or written still
    seconds: float = 0.0  # that were recorded
    steps: int = 0  # of the engine that computed something in that time
