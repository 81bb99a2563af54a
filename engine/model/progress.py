"""Progress reports while a model loads."""

import time
from collections.abc import Callable
from typing import Final, Protocol

QUICK_S: Final = 1.0


class Progress(Protocol):
    """Called from the thread that does the work."""

    def __call__(self, task: str, done: int, total: int) -> None: ...


def silent(task: str, done: int, total: int) -> None:
    pass


def unless_quick(progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Silence `progress` for the first `QUICK_S`."""
    began_s, is_slow = clock(), False

    def report(task: str, done: int, total: int) -> None:
        nonlocal is_slow
        if is_slow or clock() - began_s >= QUICK_S:
            is_slow = True
            progress(task, done, total)

    return report
