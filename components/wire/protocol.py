"""The version of everything that instances send each other, and with which versions this process can work.

Raise PROTOCOL with every change that an older process would not understand: a new tag, a changed meaning, a new version of
token frames. Raise OLDEST to it where an older process cannot be answered either. A field with a default changes neither.
`tests/components/wire/test_protocol.py` fails when a message changes without its recording.

1: until commit 3bf9314, whose records name no protocol.
2: token frames are numbered for each frontend; messages with a deadline say when they were sent.
"""

from typing import Final

PROTOCOL: Final = 2
OLDEST: Final = 2  # an older process reads our token frames as little as we read its own
UNNAMED: Final = 1  # of records without one


def understood(protocol: int, oldest: int) -> bool:
    """Whether a process of that protocol, which works with any from `oldest` on, and this one understand each other."""
    return oldest <= PROTOCOL and protocol >= OLDEST
