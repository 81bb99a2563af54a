"""Random numbers that do not follow from earlier ones, without a system call for each."""

import hashlib
import os
from itertools import count


class Unpredictable:
    """Hashes of a counter, with a random key.

    os.urandom releases the GIL, and the engine's thread would take it. So it is called only once.
    """

    def __init__(self) -> None:
        self._key = b""  # drawn at the first use: a forked process must not share it
        self._numbers = count()

    def __call__(self, bits: int) -> int:
        """At most 512 bits."""
        self._key = self._key or os.urandom(32)
        size = (bits + 7) // 8
        digest = hashlib.blake2b(next(self._numbers).to_bytes(8, "little"), key=self._key, digest_size=size).digest()
        return int.from_bytes(digest, "little") >> (8 * size - bits)
