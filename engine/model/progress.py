"""How loading reports its progress, to whoever draws the bar."""

from typing import Protocol


class Progress(Protocol):
    """Called from whichever thread does the work."""

    def __call__(self, task: str, done: int, total: int) -> None:
        """`done` of `total` steps of `task` are over."""


def silent(task: str, done: int, total: int) -> None:
    """Report to nobody."""
