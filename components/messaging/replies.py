"""Calls over NATS: a message with a subject of ours to answer on, one subscription for all answers.

nats-py's `request` does the same, and asks the kernel for random bytes at each call, which lets go of Python's lock: in a
worker the engine's thread then has it for up to half a millisecond. It also waits with `asyncio.wait_for`, which in Python
3.11 forgets a cancellation that comes in the same moment as the answer.
"""

import asyncio
from itertools import count
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from components.aio import exact_cancellation

STATUS: Final = "Status"  # a header of what the server itself says
NO_RESPONDERS: Final = "503"


async def publish(
    client: Client, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None
) -> None:
    """Send a message. With much unsent nats-py waits for the socket, and forgets a cancellation meanwhile: here it counts."""
    with exact_cancellation():
        await client.publish(subject, data, reply=reply, headers=headers)


class Replies:
    """The answers to the calls of one connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        inbox = client.new_inbox()  # the one thing that must be random
        self.subject = f"{inbox}.*"  # to be subscribed to, with `receive`
        self._prefix = f"{inbox}."
        self._numbers = count()
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}  # by the subject of the answer

    async def call(self, subject: str, data: bytes, headers: dict[str, str] | None, timeout_s: float) -> Msg:
        """Send `data` and wait for the answer. Raises: nats.errors.NoRespondersError at once, TimeoutError; as `publish`."""
        loop = asyncio.get_running_loop()
        reply = f"{self._prefix}{next(self._numbers)}"
        answered: asyncio.Future[Msg | None] = loop.create_future()
        self._waiting[reply] = answered
        timer = loop.call_later(timeout_s, _late, answered)
        try:
            await publish(self._client, subject, data, reply, headers)
            message = await answered
        finally:
            timer.cancel()
            del self._waiting[reply]
        if message is None:
            raise nats.errors.TimeoutError
        if message.headers and message.headers.get(STATUS) == NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return message

    async def receive(self, message: Msg) -> None:
        """An answer has come."""
        answered = self._waiting.get(message.subject)
        if answered is not None and not answered.done():  # else it comes too late
            answered.set_result(message)


def _late(answered: "asyncio.Future[Msg | None]") -> None:
    if not answered.done():
        answered.set_result(None)
