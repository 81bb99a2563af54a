"""Virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """A clock of virtual time. Equal times run in the order in which they were set, so that runs are reproducible."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._set = 0

    def at(self, when_s: float, call: Callable[[Any], object], argument: Any = None) -> None:
        assert when_s >= self.now_s, "time goes one way"
        self._set += 1
        heappush(self._queue, (when_s, self._set, call, argument))

    def run(self, going: Callable[[], bool]) -> None:
        queue = self._queue
        while queue and going():
            self.now_s, _, call, argument = heappop(queue)
            self.events += 1
            call(argument)
