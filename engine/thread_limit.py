"""How many threads a step may have on a machine whose cores other processes use, too.

The threads of a step wait for each other at some hundred barriers. If one of them shares its core with a busy process, the
others wait for it, and a step with two threads takes longer than with one. Measured with SmolLM2-135M on two cores beside one
busy process: 13 tokens/s with two threads, 49 with one, 76 without the neighbour.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from engine.cpu_time import CpuQuota, other_python_threads, run_delay_s

log = logging.getLogger(__name__)

WINDOW_S: Final = 0.05  # of steps, after which the number is reconsidered
CONTENDED: Final = (
    0.5  # cores that the threads waited for; a busy neighbour takes about 1 of two threads, our own services 0.1
)
FIRST_RETRY_S: Final = 0.25  # until one thread more is tried
LAST_RETRY_S: Final = 4.0  # the time grows fourfold up to this, while each try fails: the steps of a try are slow
RETRY_WINDOWS: Final = 10  # and lasts so many windows at least: a window is a step or more, and steps may be long
TRIED_WINDOWS: Final = 2  # in which one thread more has to prove itself
LOG_EVERY_S: Final = 30.0


class ThreadLimit:
    """The most threads with which a step is not held up: fewer while they wait for cores, one more from time to time.

    Used by the thread that computes the steps alone.
    """

    def __init__(
        self,
        threads: int,
        waited_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: on a quiet machine. `waited_s` counts the seconds that all of them waited for cores, summed."""
        self.threads = threads
        self._all = threads
        self._waited_s = waited_s or _waiting(CpuQuota())
        self._clock = clock
        self._retry_s = FIRST_RETRY_S
        self._changed = clock()  # when `threads` last changed
        self._windows = TRIED_WINDOWS + 1  # since one thread more was tried
        self._logged = float("-inf")
        self._begun: tuple[float, int] | None = None  # when the step under way began, and with how many threads
        self._window_s = 0.0  # of steps, in the present window
        self._waited_before_s = 0.0  # when it began
        self._used = 0  # the most threads of its steps

    def begin(self, threads: int) -> None:
        """Note that a step begins with so many threads, which may be fewer than the limit. Again: it is under way."""
        if self._begun is None:
            self._begun = (self._clock(), threads)
            if not self._window_s:
                self._waited_before_s = self._waited_s()

    def end(self) -> None:
        """Note that the step ended; `threads` may change. Without a step under way it does nothing."""
        if self._begun is None:
            return
        now = self._clock()
        began, threads = self._begun
        self._begun = None
        self._window_s += now - began
        self._used = max(self._used, threads)
        if self._window_s >= WINDOW_S:
            waited_s = self._waited_s() - self._waited_before_s
            self._judge(waited_s / self._window_s, now)
            self._window_s, self._used = 0.0, 0

    def _judge(self, contended: float, now: float) -> None:
        """Set the limit after a window in which the threads waited for so many cores."""
        self._windows += 1
        if contended >= CONTENDED:
            if self._used > 1:
                self._shrink(max(1, self._used - max(1, round(contended))), contended, now)
        elif self._used == self.threads < self._all:
            has_room = self._windows == 1  # the thread that was just added has a core: try the next one at once
            if has_room or now - self._changed >= max(self._retry_s, RETRY_WINDOWS * self._window_s):
                self.threads += 1
                self._windows = 0
                self._changed = now

    def _shrink(self, threads: int, contended: float, now: float) -> None:
        tried = self._windows <= TRIED_WINDOWS
        self._retry_s = min(4 * self._retry_s, LAST_RETRY_S) if tried else FIRST_RETRY_S
        if not tried and now - self._logged >= LOG_EVERY_S:
            log.info(
                "steps get fewer threads, for other processes use the cores",
                extra={"threads": threads, "of": self._all, "cores_waited_for": round(contended, 2)},
            )
            self._logged = now
        self.threads = min(threads, self.threads)
        self._windows = TRIED_WINDOWS + 1
        self._changed = now


def _waiting(quota: CpuQuota) -> Callable[[], float]:
    """Seconds that threads of steps waited, for a core or because the cgroup had used up its quota."""
    return lambda: run_delay_s(other_python_threads()) + quota.throttled_s()
