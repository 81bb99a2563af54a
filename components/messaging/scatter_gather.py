"""Scatter-gather: a question that any number of processes may answer."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

from nats.aio.msg import Msg

from components.aio import time_limit
from components.messaging.bus import Bus
from components.permissions import answer_subject

SEND_S: Final = 2.0  # for NATS to accept a query; a silent NATS counts as disconnected after 1.6 s


async def ask_all(
    bus: Bus, subject: str, question: bytes, receive: Callable[[bytes], bool], *, wait_s: float, least_s: float = 0.0
) -> None:
    """Publish `question` and wait for answers.

    Args:
        receive: called with each answer; returns whether all expected answers have arrived.
        wait_s: timeout for the expected answers.
        least_s: minimum wait, for answers that are not expected.
    Raises: MeshError, if NATS does not accept the query.
    """
    complete = asyncio.Event()

    async def take(message: Msg) -> None:
        if message.data and receive(message.data):  # empty: no process listens
            complete.set()

    inbox = answer_subject(bus.client.new_inbox(), subject, 0)
    async with AsyncExitStack() as stack:
        # a flush waits for up to 10 s, even after the client has noticed that NATS hangs
        async with time_limit(SEND_S, f"NATS at {bus.url} has not answered within"):
            await stack.enter_async_context(bus.subscription(inbox, take))
            await bus.publish_bytes(subject, question, reply=inbox)
        await asyncio.sleep(least_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s - least_s):
                await complete.wait()
