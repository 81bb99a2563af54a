"""frontend → frontend: load over time, for the page at /ui, which shows all frontends together."""

from msgspec import field

from components.wire.codec import Struct, message


class LoadSample(Struct):
    """What happened at one frontend in the `seconds` before `unix_s`."""

    unix_s: float
    seconds: float
    ttft: list[int] = field(default_factory=list)  # counts by bucket, the last without a bound
    gaps: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these
    generated_tokens: int = 0
    requests: int = 0  # ended
    failed: int = 0  # of these
    running: int = 0
    waiting: int = 0


@message("load-ask.v1")
class AskLoad(Struct):
    after_unix_s: float = 0.0  # only later samples


@message("load.v1")
class Load(Struct):
    samples: list[LoadSample] = field(default_factory=list)  # oldest first
