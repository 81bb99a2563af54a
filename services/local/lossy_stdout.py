"""The supervisor's stdout. If its reader stops reading, the supervisor must still drain the pipes of its children."""

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final, cast

from rich.console import Console

LIMIT_CHARS: Final = 2**20  # of waiting text; the write that blocks may hold as much again
CLOSE_WAIT_S: Final = 2.0


class LossyFile(io.TextIOBase):
    """Writes to a file descriptor in its own thread: `write` never blocks, and never raises the descriptor's errors.

    If the reader is too slow (`| less`, Ctrl-S, a hung ssh), lines are dropped, and a later line has their number. Text
    that a full disk or a closed pipe refuses is dropped silently. Characters that the encoding lacks are escaped.
    """

    def __init__(self, fd: int, encoding: str = "utf-8", *, is_terminal: bool = False) -> None:
        self._fd = fd
        self._encoding = encoding
        self._is_terminal = is_terminal
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._dropped = 0  # lines dropped since the last one that was kept
        self._ended = False
        self._changed = threading.Condition()
        # A daemon, and no buffer of Python's: the interpreter's end waits for neither.
        self._thread = threading.Thread(target=self._write_all, name="stdout", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with self._changed:
            if self._dropped or self._waiting_chars >= LIMIT_CHARS:
                self._dropped += text.count("\n")
            else:
                self._waiting.append(text)
                self._waiting_chars += len(text)
                self._changed.notify()
        return len(text)

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def close(self) -> None:
        """Wait for the last lines, for CLOSE_WAIT_S at most."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_WAIT_S)
        super().close()

    def _write_all(self) -> None:
        while text := self._next():
            left = memoryview(text.encode(self._encoding, "backslashreplace"))
            try:
                while left:
                    left = left[os.write(self._fd, left) :]
            except OSError:
                continue

    def _next(self) -> str:
        """Wait for text. Returns: all of it; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_chars or self._ended)
            texts, dropped = self._waiting, self._dropped
            self._waiting, self._waiting_chars, self._dropped = [], 0, 0
        if dropped:
            texts.append(f"({dropped} lines were not shown: the reader of this output was too slow)\n")
        return "".join(texts)


@contextmanager
def console_on_stdout() -> Iterator[Console]:
    """A console on stdout that never blocks."""
    stdout = Console()  # if stdout is closed, its file is rich's null file: each write to its descriptor, -1, fails
    with LossyFile(stdout.file.fileno(), stdout.encoding, is_terminal=stdout.file.isatty()) as file:
        yield Console(file=cast("IO[str]", file), highlight=False, soft_wrap=True)
