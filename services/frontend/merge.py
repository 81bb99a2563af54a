"""Several generators read side by side."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

from components.errors import Cancelled

MAX_HELD: Final = 2**16  # items that nobody has read: about 20 MB of tokens, a hundred with 20 alternatives each

T = TypeVar("T")


def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What any of `sources` yields, as it comes, until all are over or one raises; closing it closes them."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[tuple[T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source):
            async for item in source:
                if queue.qsize() > MAX_HELD:  # sources are never held back: whoever made them would wait as well
                    raise Cancelled("the client reads too slowly")
                queue.put_nowait((item,))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item[0]
            else:
                running -= 1
                item.result()  # raises what ended it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
