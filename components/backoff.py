"""Waits between tries."""

import random
from typing import Final

JITTER: Final = 0.5  # random share of a wait: else many processes would retry together


class Backoff:
    """Waits that double up to `last_s`."""

    def __init__(self, first_s: float = 0.2, last_s: float = 5.0, *, jitter: float = JITTER) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._jitter = jitter
        self._next_s = first_s
        self.failures = 0  # since the last success

    def failed(self) -> float:
        """Return the seconds to wait."""
        self.failures += 1
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, self._last_s)
        return wait_s * random.uniform(1 - self._jitter, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s
        self.failures = 0
