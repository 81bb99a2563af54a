"""Threads for work that cannot be interrupted."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from components.errors import Overloaded

T = TypeVar("T")


class Threads:
    """`ThreadPoolExecutor` would wait for the last work at exit."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = [Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._stopped = False

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in order of arrival. If cancelled before, it never starts.

        Raises: Overloaded after `stop`.
        """
        if self._stopped:
            raise Overloaded("this process is leaving")
        if self._threads[0].ident is None:
            for thread in self._threads:
                thread.start()
        future: Future[T] = Future()
        self._work.put((future, work))
        return asyncio.wrap_future(future)

    async def stop(self, patience_s: float) -> None:
        """Start no further work, and wait at most `patience_s`."""
        self._stopped = True
        try:
            while (waiting := self._work.get_nowait()) is not None:
                waiting[0].cancel()
        except Empty:
            pass
        for _ in self._threads:
            self._work.put(None)
        await asyncio.to_thread(self._join, time.monotonic() + patience_s)

    def _join(self, until_s: float) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (taken := self._work.get()) is not None:
            future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as exc:  # noqa: BLE001 - the caller gets it; a panic of Rust's is not an Exception
                future.set_exception(exc)
            del taken, future, work  # keeps nothing alive while idle
