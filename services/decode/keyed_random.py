"""Unpredictable random numbers without a system call for each."""

import hashlib
import os
from itertools import count


class KeyedRandom:
    """A keyed hash of a counter.

    os.urandom releases the GIL to the engine's thread, which delays the caller. So it is called only once.
    """

    def __init__(self) -> None:
        self._key = b""  # drawn on first use, so that a forked process does not share it
        self._numbers = count()

    def __call__(self, bits: int) -> int:
        """Return `bits` random bits, at most 512."""
        self._key = self._key or os.urandom(32)
        size = (bits + 7) // 8
        digest = hashlib.blake2b(next(self._numbers).to_bytes(8, "little"), key=self._key, digest_size=size).digest()
        return int.from_bytes(digest, "little") >> (8 * size - bits)
