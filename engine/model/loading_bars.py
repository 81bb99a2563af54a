"""Reports the progress bars that transformers shows while it loads weights."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

from engine.model.progress import Progress, unless_quick


@contextmanager
def reported_bars(task: str, progress: Progress) -> Iterator[None]:
    quiet = unless_quick(progress)

    def make(_factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Bar":
        return _Bar(task, quiet, args[0] if args else (), kwargs.get("total"))

    previous = transformers_logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Bar:
    """The part of tqdm that transformers uses while loading."""

    def __init__(self, task: str, progress: Progress, iterable: Iterable[Any], total: int | None) -> None:
        self._task = task
        self._progress = progress
        self._items = list(iterable)
        self._total = len(self._items) or total or 0
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        self._done += n
        self._progress(self._task, self._done, self._total)

    def close(self) -> None:
        pass
