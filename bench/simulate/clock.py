"""Virtual time: what happens next, without waiting for it."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """A queue of events. Equal times go in the order in which they were set, so a run is the same every time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0  # so far
        self._queue: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._set = 0

    def at(self, when_s: float, call: Callable[[Any], object], argument: Any = None) -> None:
        """Call `call(argument)` at `when_s`, which must not have passed."""
        assert when_s >= self.now_s, "time goes one way"
        self._set += 1
        heappush(self._queue, (when_s, self._set, call, argument))

    def run(self, going: Callable[[], bool]) -> None:
        """Let events happen while `going()` and there are any."""
        queue = self._queue
        while queue and going():
            self.now_s, _, call, argument = heappop(queue)
            self.events += 1
            call(argument)
