"""The protocol version of all messages.

Raise PROTOCOL with every change that an older process would not understand: a new tag, a changed meaning, a new
version of token frames. Raise OLDEST to it if an older process cannot be answered either. A field with a default
changes neither. A test compares messages with their recording.

1: until commit 3bf9314, whose records name no protocol. 2: token frames are numbered for each frontend; messages
with a deadline have their time of sending.
"""

from typing import Final

PROTOCOL: Final = 2
OLDEST: Final = 2  # older processes cannot read our token frames, nor we theirs
UNNAMED: Final = 1  # of records without one


def understood(protocol: int, oldest: int) -> bool:
    return oldest <= PROTOCOL and protocol >= OLDEST
