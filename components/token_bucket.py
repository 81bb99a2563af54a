"""How often something may happen: traces that are kept, log lines of requests."""

import time
from collections.abc import Callable
from math import isinf
from typing import Final

BURST_S: Final = 10.0  # of idle time, at most


class TokenBucket:
    """At most `per_s` a second on average; infinity: all."""

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
