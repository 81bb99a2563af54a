"""How many threads a step may have on a machine whose cores other processes use, too.

The threads of a step wait for each other at some hundred barriers. If one of them shares its core with a busy process, the
others wait for it, and a step with two threads takes longer than with one. Measured with SmolLM2-135M on two cores beside one
busy process: 13 tokens/s with two threads, 49 with one, 76 without the neighbour.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from engine.cpu_time import other_python_threads, run_delay_s, unused_s

log = logging.getLogger(__name__)

WINDOW_S: Final = 0.05  # of steps, after which the limit is reconsidered
CONTENDED: Final = (
    0.5  # cores that the threads waited for; a neighbour takes about 1 of two threads, our own services 0.1
)
ROOM: Final = 0.5  # cores that other processes leave unused beside our threads, so that one thread more has a core
LOOK_S: Final = 0.2  # over which unused cores are counted: the kernel counts in hundredths of a second
FIRST_RETRY_S: Final = 0.25  # between a fall of the limit and one thread more, if there is room
LAST_RETRY_S: Final = 16.0  # the same if there is no room, or if such tries have failed: the steps of a try are slow
RETRY_WINDOWS: Final = 10  # that time in windows, at least: a window is a step or more, and steps may be long
TRIED_WINDOWS: Final = 2  # in which one thread more has to prove itself
LOG_EVERY_S: Final = 30.0


class ThreadLimit:
    """The most threads with which a step is not held up.

    The limit falls while the threads of steps wait for cores. It rises by one when other processes leave a core unused. Without
    that evidence one thread more is tried every `LAST_RETRY_S`: neighbours of a low priority use all cores, but yield them.
    One thread alone may use an object of this class: the one that computes the steps.
    """

    def __init__(
        self,
        threads: int,
        decode_threads: int | None = None,
        waited_s: Callable[[], float] = lambda: run_delay_s(other_python_threads()),
        unused_s: Callable[[], float | None] = unused_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: on a quiet machine; `decode_threads`: at most so many of them for a step of decodes alone.

        `waited_s` counts the seconds that the threads of steps waited for cores, summed over the threads. `unused_s` counts
        the seconds of core time that other processes left unused; None: the system does not report them.
        """
        self.threads = threads
        self._all = threads
        self._decode_threads = decode_threads or threads
        self._waited_s = waited_s
        self._unused_s = unused_s
        self._clock = clock
        self._retry_s = FIRST_RETRY_S
        self._changed = clock()  # when `threads` last changed
        self._windows = TRIED_WINDOWS + 1  # with all threads of the limit, since one more was tried
        self._hoped = False  # whether there was room for it
        self._logged = float("-inf")
        self._begun: tuple[float, int] | None = None  # when the step under way began, and with how many threads
        self._window_s = 0.0  # of steps, in the present window
        self._waited_before_s = 0.0  # when it began
        self._used = 0  # the most threads of its steps
        self._look: tuple[float, float | None] | None = None  # when unused cores were last counted, and the count
        self._has_room = False  # as of then

    def of_step(self, *, prompts: bool) -> int:
        """The most threads for a step that begins now, with prompts or of decodes alone."""
        return self.threads if prompts else min(self.threads, self._decode_threads)

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
        if self._used == self.threads:
            self._windows += 1
        if contended >= CONTENDED:
            if self._used > 1:
                self._shrink(max(1, self._used - max(1, round(contended))), contended, now)
        elif self._used == self.threads < self._all:
            self._look_for_room(now)
            retry_s = self._retry_s if self._has_room else LAST_RETRY_S
            if retry_s > FIRST_RETRY_S:  # it may well fail
                retry_s = max(retry_s, RETRY_WINDOWS * self._window_s)
            proved = (
                self._has_room and self._windows == 1
            )  # the thread that was just added has a core: add the next at once
            if proved or now - self._changed >= retry_s:
                self.threads += 1
                self._windows = 0
                self._changed = now
                self._hoped = self._has_room

    def _look_for_room(self, now: float) -> None:
        """Find out whether other processes have left enough unused for one thread more, since the last look."""
        if self._look is not None and now - self._look[0] < LOOK_S:
            return
        unused_s, before = self._unused_s(), self._look
        self._look = (now, unused_s)
        if unused_s is None:
            self._has_room = True  # nothing is known against it
        elif before is not None and before[1] is not None:
            self._has_room = (unused_s - before[1]) / (now - before[0]) >= self.threads + ROOM

    def _shrink(self, threads: int, contended: float, now: float) -> None:
        tried = self._windows <= TRIED_WINDOWS
        if not tried:
            self._retry_s = FIRST_RETRY_S
        elif self._hoped:
            self._retry_s = min(4 * self._retry_s, LAST_RETRY_S)
        if not tried and now - self._logged >= LOG_EVERY_S:
            log.info(
                "steps get fewer threads, for other processes use the cores",
                extra={"threads": threads, "of": self._all, "cores_waited_for": round(contended, 2)},
            )
            self._logged = now
        self.threads = min(threads, self.threads)
        self._windows = TRIED_WINDOWS + 1
        self._changed = now
        self._look, self._has_room = None, False
