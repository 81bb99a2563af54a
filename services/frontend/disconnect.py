"""Cancels a request as soon as its client leaves, also while nothing is written."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive

from components.errors import Cancelled


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, answered: Callable[[], bool]) -> AsyncGenerator[None, None]:
    """Cancel the body if the client disconnects before `answered`.

    Raises: Cancelled, in place of the asyncio.CancelledError that it caused.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answered():
            gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except (asyncio.CancelledError, Cancelled) as exc:
        if gone and task.uncancel() <= before:
            raise Cancelled("the client has gone") from exc
        raise
    finally:
        watcher.cancel()
