"""What asyncio lacks: owned background tasks, the first of several reasons, work that gives up when told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, Final, TypeVar

from components.errors import DeadlineExceeded

T = TypeVar("T")

CANCEL_AGAIN_S: Final = 0.05


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


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None, late: str) -> AsyncIterator[None]:
    """Raises: DeadlineExceeded, "`late` <seconds> s", when the body is not over by then; its own TimeoutErrors as they are."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as exc:
        if limit.expired():
            raise DeadlineExceeded(f"{late} {seconds:g} s") from exc
        raise


async def ended(task: asyncio.Future[Any], *, stop: bool = False) -> None:
    """Wait until `task` is over, whatever it ends with; a cancellation of the waiting one waits for that too.

    With `stop` it is cancelled, again and again: the `asyncio.wait_for` of Python 3.11, which nats-py calls with, forgets a
    cancellation that comes in the same moment as the answer.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        if stop:
            task.cancel()
        try:
            await asyncio.wait((task,), timeout=CANCEL_AGAIN_S if stop else None)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if not task.cancelled():
        task.exception()  # seen
    if cancelled is not None:
        raise cancelled


class Failure:
    """Somebody else may learn that a piece of work is in vain."""

    def __init__(self) -> None:
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, error: Exception) -> None:
        """The work is in vain; the first telling counts."""
        if not self._told.done():
            self._told.set_exception(error)
            self._told.exception()  # raised to whoever is in `unless`; if nobody is, that is fine too

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises: what was told, as soon as it is told.

        However this ends, `work` is over then: it was cancelled, if need be more than once, and awaited.
        """
        if self._told.done():
            work.close()
            await self._told
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._told), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._told
            return await task
        finally:
            await ended(task, stop=True)
