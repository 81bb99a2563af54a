"""Notice at once that a client has left, also while nothing is being written to it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive

from components.errors import Cancelled


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, answered: Callable[[], bool]) -> AsyncGenerator[None, None]:
    """Cancel the body when the client disconnects; leave it alone once `answered`, when a disconnect is only the end.

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
