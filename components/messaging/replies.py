"""Calls over NATS, with our own reply subjects and one subscription for all answers.

nats-py's `request` reads random bytes from the kernel at each call. Meanwhile the engine's thread may take Python's lock for
half a millisecond. Its `asyncio.wait_for` loses a cancellation that arrives with the answer (Python 3.11).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from components.aio import exact_cancellation
from components.permissions import answer_subject
from components.wire.codec import MAX_SUBJECT

FIRST_REPEAT_S: Final = 1.0  # of an unanswered call
QUICK_REPEATS: Final = 8  # a second apart; then the pause doubles
MAX_REPEAT_PAUSE_S: Final = 8.0  # between repetitions; the receiver keeps an answer for 30 s, and two may be lost
STATUS: Final = "Status"  # header of NATS's own messages
NO_RESPONDERS: Final = "503"


class RespondersGone(nats.errors.NoRespondersError):  # type: ignore[misc]  # nats-py has no types
    """No process listens now, but one may have received the first message."""


async def publish(
    client: Client, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None
) -> None:
    """Unlike nats-py's, this does not lose a cancellation while it waits for the socket.

    Raises: nats.errors.BadSubjectError, also for a subject that would end the connection.
    """
    if len(subject) + len(reply) > MAX_SUBJECT:
        raise nats.errors.BadSubjectError
    with exact_cancellation():
        await client.publish(subject, data, reply=reply, headers=headers)


class Replies:
    """The answers to one connection's calls.

    NATS may lose a call or its answer during a restart. An unanswered call is sent again with the same reply subject, so its
    receiver recognises it and runs it once.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()  # the only random part
        self.subject = f"{self._inbox}.>"  # subscribe `receive` to it
        self._numbers = count()
        self._waiting: dict[str, _Call] = {}  # by reply subject
        self._on_no_responders: dict[str, Callable[[], None]] = {}  # by reply subject
        self._probes: dict[str, str] = {}  # reply subjects by probed subject

    async def call(self, subject: str, data: bytes, headers: dict[str, str] | None, timeout_s: float) -> Msg:
        """Send `data` and wait for the answer.

        Raises: nats.errors.NoRespondersError at once; RespondersGone; TimeoutError; errors of `publish`.
        """
        reply = answer_subject(self._inbox, subject, next(self._numbers))
        call = self._waiting[reply] = _Call(self._client, subject, data, reply, headers)
        timer = asyncio.get_running_loop().call_later(timeout_s, call.end, None)
        try:
            message = await call.answer()
        finally:
            timer.cancel()
            del self._waiting[reply]
        if message is None:
            raise nats.errors.TimeoutError
        if _no_responders(message):
            raise RespondersGone if call.was_repeated else nats.errors.NoRespondersError
        return message

    def on_no_responders(self, subject: str, callback: Callable[[], None]) -> str:
        reply = self._probes.get(subject)
        if reply is None:
            reply = self._probes[subject] = f"{self._inbox}.{next(self._numbers)}"
        self._on_no_responders[reply] = callback
        return reply

    async def receive(self, message: Msg) -> None:
        call = self._waiting.get(message.subject)
        if call is None:
            if _no_responders(message) and (callback := self._on_no_responders.get(message.subject)) is not None:
                callback()
            return
        call.answered_by(message)


class _Call:
    __slots__ = ("_answered", "_client", "_message", "_refused", "_repeating", "_repeats", "_timer")

    def __init__(self, client: Client, *message: Any) -> None:
        """`message` is the arguments of `publish`."""
        self._client = client
        self._message = message
        self._answered: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._repeats = 0
        self._refused = 0  # latest repetition without a listener
        self._repeating: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def was_repeated(self) -> bool:
        return self._repeats > 0

    async def answer(self) -> Msg | None:
        """Repeat the call until it is answered. None: a timeout."""
        self._repeat_after(FIRST_REPEAT_S)
        try:
            await publish(self._client, *self._message)
            return await self._answered
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._repeating is not None:
                self._repeating.cancel()

    def answered_by(self, message: Msg) -> None:
        if _no_responders(message) and self._repeats:
            # The first message was received; the receiver may be reconnecting, or about to answer and leave.
            before, self._refused = self._refused, self._repeats
            if not 0 < before == self._repeats - 1:
                return
        self.end(message)

    def end(self, message: Msg | None) -> None:
        if not self._answered.done():
            self._answered.set_result(message)

    def _repeat_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._repeat, seconds)

    def _repeat(self, waited_s: float) -> None:
        self._repeats += 1
        # While NATS is unreachable, the first message is in the client's buffer, which other calls need, too.
        if self._client.is_connected and (self._repeating is None or self._repeating.done()):
            self._repeating = asyncio.ensure_future(self._publish_again())
        self._repeat_after(waited_s if self._repeats < QUICK_REPEATS else min(2 * waited_s, MAX_REPEAT_PAUSE_S))

    async def _publish_again(self) -> None:
        # the call fails at its timeout, unless a later try succeeds
        with suppress(nats.errors.Error, OSError, RuntimeError, AttributeError):
            await publish(self._client, *self._message)


def _no_responders(message: Msg) -> bool:
    return bool(message.headers) and message.headers.get(STATUS) == NO_RESPONDERS
