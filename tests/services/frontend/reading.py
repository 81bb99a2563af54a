"""The branches of a prompt read one item at a time, by a test that waits for them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from components.wire.generate import StreamItem
from services.frontend.ports import Mesh, Prompt


class Reading:
    """Keeps what comes for each branch until the test asks for it; a `services.frontend.ports.Sink`."""

    def __init__(self, branches: int) -> None:
        self.came: list[asyncio.Queue[StreamItem | Exception]] = [asyncio.Queue() for _ in range(branches)]
        self.unwanted: set[int] = set()  # branches that are cancelled at their next item

    def add_tokens(self, branch: int, item: StreamItem) -> bool:
        self.came[branch].put_nowait(item)
        return branch not in self.unwanted

    def fail(self, error: Exception) -> None:
        for queue in self.came:
            queue.put_nowait(error)

    async def items(self, branch: int) -> AsyncGenerator[StreamItem, None]:
        """To the last one. Raises: what the mesh reported."""
        while True:
            item = await self.came[branch].get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish is not None:
                return


@asynccontextmanager
async def reading(mesh: Mesh, prompt: Prompt) -> AsyncIterator[list[AsyncGenerator[StreamItem, None]]]:
    """The items of each branch; leaving cancels what still runs."""
    sink = Reading(prompt.sampling.n)
    branches = await mesh.generate(prompt, sink)
    try:
        yield [sink.items(i) for i in range(prompt.sampling.n)]
    finally:
        for branch in branches:
            branch.close()
