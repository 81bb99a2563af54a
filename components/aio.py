"""What asyncio lacks: owned background tasks, the first of several reasons, work that gives up when told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from components.errors import DeadlineExceeded

T = TypeVar("T")


async def first(*reasons: Awaitable[object]) -> None:
    """Return when the first of `reasons` completes; raise what it raised."""
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
    """Raise what `error` brings."""
    raise await error


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` while inside. Raises: what `work` raises, at once: the body is cancelled, for it stands on this work."""
    error: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work, name=name)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as failed:
        error = failed.exceptions[-1]  # the body's own stands last
    if error is not None:
        raise error


class time_limit:  # noqa: N801 - it is used as `asyncio.timeout` is
    """Raises: DeadlineExceeded, "`late` <seconds> s", when the body is not over by then; its own TimeoutErrors as they are."""

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


class exact_cancellation:  # noqa: N801 - it is used as `asyncio.timeout` is
    """Cancels its body's task if, and only if, somebody asked for that: nats-py forgets some, and passes on others' own."""

    __slots__ = ("_before", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._task is not None and self._task.cancelling() > self._before:
            if kind is None:
                raise asyncio.CancelledError
            return False
        return kind is asyncio.CancelledError


async def ended(task: asyncio.Future[Any]) -> None:
    """Wait until `task` is over, whatever it ends with; a cancellation of the waiting one waits for that too."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    if not task.cancelled():
        task.exception()  # seen
    if cancelled is not None:
        raise cancelled


class Failure:
    """Somebody else may learn that a piece of work is in vain."""

    __slots__ = ("_error", "_stopped", "_task")

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None  # that works
        self._stopped = False  # by us

    def tell(self, error: Exception) -> None:
        """The work is in vain; the first telling counts."""
        if self._error is not None:
            return
        self._error = error
        if self._task is not None and self._task is asyncio.current_task():
            asyncio.get_running_loop().call_soon(self._stop)  # not now: its work may be over before it waits again
        else:
            self._stop()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, for one at a time. Raises: what was told, as soon as it is told.

        However this ends, `work` is over then. It runs in the task that calls, which is cancelled for it as by
        `asyncio.timeout`: so it must not forget a cancellation, as `asyncio.wait_for` of Python 3.11 may.
        """
        if self._error is not None:
            work.close()
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        before, self._task = task.cancelling(), task
        try:
            return await work
        except asyncio.CancelledError:
            if self._stopped and self._error is not None and task.cancelling() - 1 <= before:
                raise self._error from None
            raise
        finally:
            self._task = None
            if self._stopped:
                task.uncancel()  # also when the work ended otherwise: who cancels next must not be taken for us

    async def within(self, seconds: float, late: Exception, work: Coroutine[Any, Any, T]) -> T:
        """As `unless`; `late` is told after so many seconds."""
        timer = asyncio.get_running_loop().call_later(seconds, self.tell, late)
        try:
            return await self.unless(work)
        finally:
            timer.cancel()

    def _stop(self) -> None:
        if self._task is not None and not self._stopped:
            self._stopped = self._task.cancel()
