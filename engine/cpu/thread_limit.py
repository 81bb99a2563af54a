"""Limit a step's threads to the cores that other processes leave.

A step has some hundred barriers, where all threads wait for one without a core
(docs/decisions/002-threads-follow-free-cores.md).
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from engine.cpu.cpu_time import ComputeDelay, unused_s

log = logging.getLogger(__name__)

WINDOW_S: Final = 0.05  # of steps, between two decisions
CONTENDED: Final = 0.5  # cores that threads waited for; a busy process causes about 1
ROOM: Final = 0.5  # unused cores for one more thread
LOOK_S: Final = 0.2  # the kernel counts in hundredths of a second
FIRST_RETRY_S: Final = 0.25  # before one more thread, if there is room
LAST_RETRY_S: Final = 16.0  # the same without room or after failed tries
RETRY_WINDOWS: Final = 10  # minimum of it in windows, which long steps extend
TRIED_WINDOWS: Final = 2  # trial period of an added thread
LOG_EVERY_S: Final = 30.0


class ThreadLimit:
    """The limit falls while threads wait for cores, and rises by one when a core is unused.

    It also rises every `LAST_RETRY_S`, because low-priority processes yield their cores. For the computing thread only.

    Args:
        threads: on a quiet machine.
        decode_threads: limit for a step of decodes only.
        waited_s: sums the seconds that threads waited for cores; default: `ComputeDelay`.
        unused_s: sums core seconds that others left unused; None: unknown.
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
        self._windows = TRIED_WINDOWS + 1  # with the full limit, since the last try
        self._hoped = False  # whether that try had room
        self._logged = float("-inf")
        self._begun: tuple[float, int] | None = None  # start and threads
        self._window_s = 0.0  # of steps in the current window
        self._waited_before_s = 0.0  # at its start
        self._used = 0  # maximum in it
        self._look: tuple[float, float | None] | None = None  # time and value of `unused_s`
        self._has_room = False  # as of then

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
        """Set the limit. `contended` is the mean number of cores waited for."""
        if self._used == self.threads:
            self._windows += 1
        if contended >= CONTENDED:
            if self._used > 1:
                self._shrink(max(1, self._used - max(1, round(contended))), contended, now)
        elif self._used == self.threads < self._all:
            self._look_for_room(now)
            retry_s = self._retry_s if self._has_room else LAST_RETRY_S
            if retry_s > FIRST_RETRY_S:  # likely to fail
                retry_s = max(retry_s, RETRY_WINDOWS * self._window_s)
            proved = self._has_room and self._windows == 1  # the added thread has a core: add the next
            if proved or now - self._changed >= retry_s:
                self.threads += 1
                self._windows = 0
                self._changed = now
                self._hoped = self._has_room

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
