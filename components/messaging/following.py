"""NATS subscriptions to a role's workers, open while this process follows them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from nats.aio.msg import Msg

from components.aio import background
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.fan_out import SubscriptionChoice

RETRY_S: Final = 0.5

Handler = Callable[[Msg], Awaitable[None]]


class _Subscription:
    def __init__(self, bus: Bus, subject: str, handler: Handler, following: SubscriptionChoice) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._following = following
        self._open: AsyncExitStack | None = None
        self._stale = asyncio.Event()
        following.on_change(self._stale.set)

    async def update(self) -> None:
        self._stale.clear()
        if self._following.queries_instances:
            await self.close()
        elif self._open is None:
            stack = AsyncExitStack()
            await stack.enter_async_context(self._bus.subscription(self._subject, self._handler))
            self._open = stack

    async def run(self) -> None:
        """After an outage nats-py renews the subscription."""
        while True:
            await self._stale.wait()
            try:
                if self._bus.client.is_connected:
                    await self.update()
                    continue
            except MeshError:
                self._stale.set()
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened.aclose()


@asynccontextmanager
async def subscribed(
    bus: Bus, subject: str, handler: Handler, following: SubscriptionChoice | None
) -> AsyncIterator[None]:
    """Pass messages from a role's workers to `handler`, while `following` says to follow them.

    Args:
        subject: with `*` for the instance id.
        following: None: always.
    """
    if following is None:
        async with bus.subscription(subject, handler):
            yield
        return
    subscription = _Subscription(bus, subject, handler, following)
    try:
        await subscription.update()
        async with background(subscription.run(), f"follow {subject}"):
            yield
    finally:
        await subscription.close()
