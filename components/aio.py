"""Owned background tasks, and work that another task can fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from components.errors import DeadlineExceeded

T = TypeVar("T")


async def first(*reasons: Awaitable[object]) -> None:
    """Return when one completes, or raise its error."""
    tasks = [asyncio.ensure_future(reason) for reason in reasons]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def raises(error: Awaitable[BaseException]) -> None:
    raise await error


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """An error of `work` cancels the body at once."""
    error: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work, name=name)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as failed:
        error = failed.exceptions[-1]  # the body's own is the last
    if error is not None:
        raise error


class BackgroundTasks:
    """Owns tasks: the event loop itself keeps only weak references."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def drain(self) -> None:
        """Wait for all tasks, also those that start meanwhile. Their errors are not raised."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        self.cancel()
        await self.drain()


class time_limit:  # noqa: N801 - it is used as `asyncio.timeout` is
    """Limits the time of its body. Raises: DeadlineExceeded, "`late` SECONDS s"; TimeoutErrors of the body pass through."""

    __slots__ = ("_late", "_limit", "_seconds")

    def __init__(self, seconds: float | None, late: str) -> None:
        self._seconds = seconds
        self._late = late

    async def __aenter__(self) -> None:
        self._limit = asyncio.timeout(self._seconds)
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{self._late} {self._seconds:g} s") from exc


def _delivered(task: asyncio.Task[Any]) -> int:
    """Cancellations that `task` has received. One requested while it runs is delivered at its next await."""
    return task.cancelling() - int(task._must_cancel)  # type: ignore[attr-defined]  # CPython's, not in typeshed


class exact_cancellation:  # noqa: N801 - it is used as `asyncio.timeout` is
    """Raise CancelledError exactly if the task was cancelled: nats-py may swallow a cancellation, or raise one of its own."""

    __slots__ = ("_before", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else _delivered(self._task)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._task is not None and _delivered(self._task) > self._before:
            if kind is None:
                raise asyncio.CancelledError
            return False
        return kind is asyncio.CancelledError


def exception_of(done: asyncio.Future[Any]) -> BaseException | None:
    """The error of a done future; None if it was cancelled. asyncio does not log it after this."""
    return None if done.cancelled() else done.exception()


async def ended(task: asyncio.Future[Any]) -> None:
    """Wait even if the caller is cancelled. Errors of `task` are not raised."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    exception_of(task)
    if cancelled is not None:
        raise cancelled


class Failure:
    """Interrupts one task's work with an error that another task reports."""

    __slots__ = ("_error", "_stopped", "_task")

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stopped = False  # cancelled here

    def report(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._task is not None and self._task is asyncio.current_task():
            asyncio.get_running_loop().call_soon(self._stop)  # not now: the work may end before it waits again
        else:
            self._stop()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, or raise the error of `report` at once.

        `work` must not swallow a cancellation, as Python 3.11's `asyncio.wait_for` may.
        """
        if self._error is not None:
            work.close()
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        before, self._task = _delivered(task), task
        try:
            return await work
        except asyncio.CancelledError:
            if self._stopped and self._error is not None and _delivered(task) - 1 <= before:
                raise self._error from None
            raise
        finally:
            self._task = None
            if self._stopped:
                task.uncancel()  # or the next cancellation would seem to be ours

    async def within(self, seconds: float, late: Exception, work: Coroutine[Any, Any, T]) -> T:
        timer = asyncio.get_running_loop().call_later(seconds, self.report, late)
        try:
            return await self.unless(work)
        finally:
            timer.cancel()

    def _stop(self) -> None:
        if self._task is not None and not self._stopped:
            self._stopped = self._task.cancel()
