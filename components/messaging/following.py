"""NATS subscriptions to what the workers of one role publish: to all of them, or to those that this process follows."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from nats.aio.msg import Msg

from components.aio import background
from components.discovery.book import InstanceBook
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.fan_out import Following

RETRY_S: Final = 0.5

Handler = Callable[[Msg], Awaitable[None]]


class _Subscriptions:
    """Keeps the subscriptions that `following` asks for: one for all instances, or one for each in `book`, one of its books."""

    def __init__(self, bus: Bus, everyone: str, handler: Handler, book: InstanceBook, following: Following) -> None:
        self._bus = bus
        self._everyone = everyone
        self._handler = handler
        self._book = book
        self._following = following
        self._open: dict[str, AsyncExitStack] = {}  # by subject
        self._stale = asyncio.Event()
        following.on_change(self._stale.set)

    async def update(self) -> None:
        """Subscribe to what is missing, then leave what is not wanted. Raises: MeshError."""
        self._stale.clear()
        wanted = {self._everyone}
        if self._following.is_partial:
            wanted = {self._everyone.replace("*", r.instance_id) for r in self._book.of_role("prefill")}
        for subject in wanted - self._open.keys():
            stack = AsyncExitStack()
            await stack.enter_async_context(self._bus.subscription(subject, self._handler))
            self._open[subject] = stack
        for subject in self._open.keys() - wanted:
            await self._open.pop(subject).aclose()

    async def run(self) -> None:
        """Update for ever, after each change. While NATS is away, this waits: the client subscribes anew by itself."""
        while True:
            await self._stale.wait()
            try:
                if self._bus.client.is_connected:
                    await self.update()
                    continue
            except MeshError:  # the bus reports its own outages
                self._stale.set()
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Leave all of them."""
        while self._open:
            await self._open.popitem()[1].aclose()


@asynccontextmanager
async def subscribed(
    bus: Bus, everyone: str, handler: Handler, book: InstanceBook, following: Following | None
) -> AsyncIterator[None]:
    """`handler` gets what the workers of a role publish on a kind of subject, while inside.

    Args:
        bus: the connection.
        everyone: the subject, with `*` for the id of the instance.
        handler: as `Bus.subscription` has it.
        book: the instances wanted: with `following`, one of its books.
        following: None: all instances are wanted.
    """
    if following is None:
        async with bus.subscription(everyone, handler):
            yield
        return
    subscriptions = _Subscriptions(bus, everyone, handler, book, following)
    try:
        await subscriptions.update()
        async with background(subscriptions.run(), f"follow {everyone}"):
            yield
    finally:
        await subscriptions.close()
