"""A token bucket for new traces."""

import time
from collections.abc import Callable
from math import isinf
from typing import Final

BURST_S: Final = 10.0  # of idle time, at most


class TraceRate:
    """At most `per_s` new traces a second on average; infinity: all.

    Spans of every request cost a quarter of the mesh's processor time.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = self._most = max(1.0, per_s * BURST_S) if per_s else 0.0
        self._at = clock()

    def take(self) -> bool:
        if isinf(self._per_s):
            return True
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
