"""A log handler that counts equal lines instead of repeating them.

Lines are equal if their logger, level and constant message are. In each window the first few are written at once; at its end
the last one is, with the number of suppressed lines as `repeated`. Always written:

- DEBUG lines;
- a traceback that is new in this window, because two with one message may be two bugs;
- `ready` and `progress`, which a supervisor waits for;
- the line at the end of each request. Those of level INFO are gathered for GATHER_S, because each write wakes the process
  that reads them, which interrupts ours.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from copy import copy
from typing import Final, TextIO

BURST: Final = 5  # equal lines written at once
WINDOW_S: Final = 10.0  # from a window's first line
GATHER_S: Final = 0.2
MAX_WINDOWS: Final = 1024  # bounds memory, because some libraries put facts into their messages

status = logging.getLogger("kvmesh.status")
requests = logging.getLogger("kvmesh.requests")

UNCOUNTED: Final = frozenset({status.name, requests.name})
OURS: Final = ("components.", "services.", "engine.", "__main__")


class _Window:
    __slots__ = ("count", "ends_s", "held")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.count = 0
        self.held: logging.LogRecord | None = None  # the last line that was not written


class CountingHandler(logging.StreamHandler[TextIO]):
    """The handler's lock, which `logging` holds around `emit`, guards the windows."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, window_s: float = WINDOW_S) -> None:
        super().__init__(stream)
        self._clock = clock
        self._window_s = window_s
        self._windows: dict[Hashable, _Window] = {}
        self._gathered: list[str] = []
        self._timer: threading.Timer | None = None  # while there are held or gathered lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == requests.name and record.levelno == logging.INFO:
            self._gathered.append(self.format(record))
            if len(self._gathered) == 1:
                self._start_timer(GATHER_S)
            return
        self._write_gathered()
        if record.levelno <= logging.DEBUG or record.name in UNCOUNTED:
            super().emit(record)
            return
        now_s, key = self._clock(), _key(record)
        window = self._windows.get(key)
        if window is None or now_s >= window.ends_s:
            self.sweep(all_of_them=len(self._windows) >= MAX_WINDOWS)
            window = self._windows[key] = _Window(now_s + self._window_s)
        window.count += 1
        if window.count <= BURST:
            super().emit(record)
            return
        window.held = record
        if self._timer is None:
            self._start_timer(window.ends_s - now_s)

    def sweep(self, *, all_of_them: bool = False) -> None:
        """Write the held lines of ended windows."""
        self.acquire()
        try:
            now_s = self._clock()
            over = [key for key, window in self._windows.items() if all_of_them or now_s >= window.ends_s]
            for key in over:
                window = self._windows.pop(key)
                if window.held is not None:
                    last = copy(window.held)
                    last.__dict__["repeated"] = window.count - BURST
                    super().emit(last)
        finally:
            self.release()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.stream is not None and not self.stream.closed:
            self._write_gathered()
            self.sweep(all_of_them=True)
        super().close()

    def _write_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            with suppress(OSError, ValueError):  # the reader is gone
                self.stream.write("".join([f"{line}{self.terminator}" for line in gathered]))
                self.flush()

    def _start_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(max(seconds, 0.0), self._timed)
        self._timer.daemon = True
        self._timer.start()

    def _timed(self) -> None:
        self.acquire()
        try:
            self._timer = None
            self._write_gathered()
            self.sweep()
            holding = [window.ends_s for window in self._windows.values() if window.held is not None]
            if holding:
                self._start_timer(min(holding) - self._clock())
        finally:
            self.release()


def _key(record: logging.LogRecord) -> Hashable:
    """The key includes the place where a traceback was raised.

    Libraries put facts into their messages: their lines are equal if they come from one place in the code.
    """
    message: Hashable = record.msg if isinstance(record.msg, str) else str(record.msg)
    if not record.name.startswith(OURS):
        message = record.pathname, record.lineno
    if not record.exc_info or record.exc_info[0] is None:
        return record.name, record.levelno, message
    kind, _, trace = record.exc_info
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = None if trace is None else (trace.tb_frame.f_code, trace.tb_lineno)
    return record.name, record.levelno, message, kind, where
