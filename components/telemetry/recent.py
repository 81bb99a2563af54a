"""Sums and rates over the last seconds."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

RECENT_S: Final = 5.0
EVERY_S: Final = 0.25

Clock = Callable[[], float]


class RecentSum:
    """Rate over the last RECENT_S, from this window and the rest of the one before."""

    __slots__ = ("_before", "_now", "_since_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._now = self._before = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self._turn(now_s)
        self._now += amount

    def per_s(self, now_s: float) -> float:
        self._turn(now_s)
        left = 1 - (now_s - self._since_s) / RECENT_S
        return (self._now + self._before * left) / RECENT_S

    def _turn(self, now_s: float) -> None:
        passed = int((now_s - self._since_s) / RECENT_S)
        if passed:
            self._before = self._now if passed == 1 else 0.0
            self._now = 0.0
            self._since_s = now_s if passed > 1 else self._since_s + RECENT_S


class LoopProbe:
    """Measures how late the event loop wakes a task, and the rate of a total."""

    def __init__(self, total: Callable[[], float] = float, clock: Clock = time.monotonic) -> None:
        self.total = total
        self.on_lag: Callable[[float], None] = lambda _: None
        self._clock = clock
        self._lags: deque[float] = deque(maxlen=int(RECENT_S / EVERY_S))
        self._totals: deque[tuple[float, float]] = deque(maxlen=int(RECENT_S / EVERY_S) + 1)

    @property
    def worst_lag_s(self) -> float:
        return max(self._lags, default=0.0)

    @property
    def per_s(self) -> float:
        if len(self._totals) < 2:
            return 0.0
        (began_s, first), (ended_s, last) = self._totals[0], self._totals[-1]
        return max(0.0, last - first) / max(ended_s - began_s, EVERY_S)

    async def run(self) -> None:
        while True:
            due_s = self._clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.note(self._clock() - due_s)

    def note(self, lag_s: float) -> None:
        lag_s = max(0.0, lag_s)
        self._lags.append(lag_s)
        self._totals.append((self._clock(), self.total()))
        self.on_lag(lag_s)
