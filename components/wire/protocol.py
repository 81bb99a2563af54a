"""The protocol version of all messages.

Raise PROTOCOL for what older processes cannot read, such as a new tag. Raise OLDEST if this process cannot read the
older form. A field with a default changes neither.
"""

from typing import Final

PROTOCOL: Final = 3
OLDEST: Final = 3  # earlier requests have other sampling parameters
UNNAMED: Final = 1  # of records without a version


def understood(protocol: int, oldest: int) -> bool:
    return oldest <= PROTOCOL and protocol >= OLDEST
