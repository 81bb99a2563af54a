"""The protocol version of all messages.

Raise PROTOCOL if an older process would not understand a change: a new tag, a changed meaning, a new version of token
frames. Raise OLDEST, too, if this process no longer understands the older one. A field with a default changes neither.

2: token frames are numbered for each frontend, and messages with a deadline have their time of sending.
3: `SamplingParams` is the engine's own struct.
"""

from typing import Final

PROTOCOL: Final = 3
OLDEST: Final = 3  # earlier requests have other sampling parameters
UNNAMED: Final = 1  # of records without a version


def understood(protocol: int, oldest: int) -> bool:
    return oldest <= PROTOCOL and protocol >= OLDEST
