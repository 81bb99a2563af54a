"""Limits a step's threads to the cores that other processes do not use.

A step has several hundred barriers, at which all threads wait for one that has no core
(docs/decisions/002-threads-follow-free-cores.md).
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from engine.cpu.cpu_time import ComputeDelay, unused_s

log = logging.getLogger(__name__)

WINDOW_S: Final = 0.05  # minimum time in steps between two decisions
CONTENDED: Final = 0.5  # mean cores waited for at which the limit falls; a busy process causes about 1
ROOM: Final = 0.5  # unused cores that one more thread requires
LOOK_S: Final = 0.2  # between readings of unused cores, which the kernel counts in hundredths of a second
FIRST_RETRY_S: Final = 0.25  # pause before one more thread is tried, if there is room
LAST_RETRY_S: Final = 16.0  # the same without room, or after failed tries
RETRY_WINDOWS: Final = 10  # minimum of a longer pause, because long steps extend windows
TRIED_WINDOWS: Final = 2  # trial period of an added thread
LOG_EVERY_S: Final = 30.0


class ThreadLimit:
    """The limit falls while threads wait for cores, and rises by one when a core is unused.

    It also rises every `LAST_RETRY_S`, because low-priority processes yield their cores.

    Args:
        threads: limit on an otherwise idle machine.
        decode_threads: limit for a step of decodes only.
        waited_s: returns the seconds that threads waited for cores; default: `ComputeDelay`.
    """

    def __init__(
        self,
        threads: int,
        decode_threads: int | None = None,
        waited_s: Callable[[], float] | None = None,
        unused_s: Callable[[], float | None] = unused_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = threads
        self._all = threads
        self._decode_threads = decode_threads or threads
        self._waited_s = waited_s or ComputeDelay()
        self._unused_s = unused_s
        self._clock = clock
        self._retry_s = FIRST_RETRY_S
        self._changed = clock()
        self._windows = TRIED_WINDOWS + 1  # with the full limit used, since the last try
        self._tried_with_room = False
        self._logged = float("-inf")
        self._begun: tuple[float, int] | None = None  # start and threads of the current step
        self._window_s = 0.0  # of the steps in the current window
        self._waited_before_s = 0.0  # `waited_s` at the start of the window
        self._used = 0  # most threads in the window
        self._look: tuple[float, float | None] | None = None  # time and value of `unused_s`
        self._has_room = False  # at that time

    def of_step(self, *, prompts: bool) -> int:
        return self.threads if prompts else min(self.threads, self._decode_threads)

    def begin(self, threads: int) -> None:
        if self._begun is None:
            self._begun = (self._clock(), threads)
            if not self._window_s:
                self._waited_before_s = self._waited_s()

    def end(self) -> None:
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
        """`contended`: the mean number of cores waited for."""
        if self._used == self.threads:
            self._windows += 1
        if contended >= CONTENDED:
            if self._used > 1:
                self._shrink(max(1, self._used - max(1, round(contended))), contended, now)
        elif self._used == self.threads < self._all:
            self._look_for_room(now)
            retry_s = self._retry_s if self._has_room else LAST_RETRY_S
            if retry_s > FIRST_RETRY_S:  # the try is likely to fail
                retry_s = max(retry_s, RETRY_WINDOWS * self._window_s)
            proved = self._has_room and self._windows == 1  # the added thread got a core, so add the next
            if proved or now - self._changed >= retry_s:
                self.threads += 1
                self._windows = 0
                self._changed = now
                self._tried_with_room = self._has_room

    def _look_for_room(self, now: float) -> None:
        if self._look is not None and now - self._look[0] < LOOK_S:
            return
        unused_s, before = self._unused_s(), self._look
        self._look = (now, unused_s)
        if unused_s is None:
            self._has_room = True  # no evidence against it
        elif before is not None and before[1] is not None:
            self._has_room = (unused_s - before[1]) / (now - before[0]) >= self.threads + ROOM

    def _shrink(self, threads: int, contended: float, now: float) -> None:
        tried = self._windows <= TRIED_WINDOWS
        if not tried:
            self._retry_s = FIRST_RETRY_S
        elif self._tried_with_room:
            self._retry_s = min(4 * self._retry_s, LAST_RETRY_S)
        if not tried and now - self._logged >= LOG_EVERY_S:
            log.info(
                "steps get fewer threads, because other processes use the cores",
                extra={"threads": threads, "of": self._all, "cores_waited_for": round(contended, 2)},
            )
            self._logged = now
        self.threads = min(threads, self.threads)
        self._windows = TRIED_WINDOWS + 1
        self._changed = now
        self._look, self._has_room = None, False
