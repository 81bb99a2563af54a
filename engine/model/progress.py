"""How loading reports its progress, to whoever draws the bar."""

import time
from collections.abc import Callable
from typing import Final, Protocol

QUICK_S: Final = 1.0


class Progress(Protocol):
    """Called from whichever thread does the work."""

    def __call__(self, task: str, done: int, total: int) -> None:
        """`done` of `total` steps of `task` are over."""


def silent(task: str, done: int, total: int) -> None:
    """Report to nobody."""


def unless_quick(progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """`progress`, from `QUICK_S` after now on: of what is over sooner, nobody needs to see a bar."""
    began_s, told = clock(), False

    def report(task: str, done: int, total: int) -> None:
        nonlocal told
        if told or clock() - began_s >= QUICK_S:
            told = True
            progress(task, done, total)

    return report
