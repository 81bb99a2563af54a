"""What a process does over its NATS connection: calls, publications and subscriptions."""

import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final, TypeVar, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from components.aio import exact_cancellation
from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    MalformedMessage,
    MessageTooLarge,
)
from components.messaging.clocks import PeerClocks
from components.messaging.nats_errors import translated_nats_errors
from components.messaging.refusals import Refusals
from components.messaging.replies import Replies, publish
from components.telemetry.spans import trace_headers
from components.urls import without_password
from components.wire.codec import Struct, pack, unpack
from components.wire.refused import Refused, raised

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Struct)

# Disconnect from a silent server after 1.6 s, before peers count this process as silent (nats-py: four minutes).
PING_EVERY_S: Final = 0.4
MAX_PINGS: Final = 3  # unanswered
PENDING_MESSAGES: Final = 1 << 20  # more are silently dropped; frame numbers reveal it
PENDING_BYTES: Final = 1 << 30
HEADERS_BYTES: Final = 512  # they count, too: NATS closes the connection for one byte too many


class Bus:
    def __init__(self, client: Client, url: str) -> None:
        self.client = client
        self.url = without_password(url)  # for logs and errors
        self.refusals = Refusals()
        self.reconnected_s = -math.inf  # monotonic
        self.disconnected_s = -math.inf
        self.clocks = PeerClocks()
        self._replies = Replies(client)

    @property
    def is_connected(self) -> bool:
        return bool(self.client.is_connected)

    def since_reconnect_s(self) -> float:
        """Infinity without a reconnect, 0 while disconnected."""
        # nats-py reports itself as connected before it calls us; answers to waiting calls arrive in between
        if not self.client.is_connected or self.disconnected_s > self.reconnected_s:
            return 0.0
        return time.monotonic() - self.reconnected_s

    def contact_age_s(self) -> float:
        """Time since NATS last answered a ping, in steps of PING_EVERY_S."""
        if self.client.is_connected:
            return float(self.client._pings_outstanding) * PING_EVERY_S
        return time.monotonic() - self.disconnected_s + MAX_PINGS * PING_EVERY_S

    def answers(self) -> AbstractAsyncContextManager[None]:
        return self.subscription(self._replies.subject, self._replies.receive)

    async def call(self, subject: str, request: Struct, *replies: type[S], timeout_s: float) -> S:
        """Return the answer, one of the classes `replies`.

        Raises: PeerLost at once if no process listens; DeadlineExceeded after `timeout_s`; BackendUnavailable if NATS was
        unreachable during the call; MessageTooLarge; the error that the receiver answered with.
        """
        data = self._packed(subject, request)
        try:
            with translated_nats_errors(subject, self.url):
                message = await self._replies.call(subject, data, trace_headers(), timeout_s)
        except DeadlineExceeded as exc:
            if self.since_reconnect_s() < timeout_s:  # after our own outage the receiver may be healthy
                raise BackendUnavailable(f"NATS at {self.url} was unreachable during a call", subject=subject) from exc
            raise
        try:
            answer = unpack(message.data, *replies, Refused)
        except MalformedMessage as exc:
            self.refusals.count("answer", exc)
            raise
        if isinstance(answer, Refused):
            raise raised(answer)
        return cast("S", answer)

    async def publish(self, subject: str, message: Struct) -> None:
        await self.publish_bytes(subject, self._packed(subject, message))

    async def publish_bytes(self, subject: str, data: bytes, reply: str = "") -> None:
        with translated_nats_errors(subject, self.url):
            await publish(self.client, subject, data, reply)

    def on_no_responders(self, subject: str, callback: Callable[[], None]) -> str:
        """A reply subject for messages to `subject`: NATS calls `callback` at once if no process listens.

        A new callback replaces the earlier one.
        """
        return self._replies.on_no_responders(subject, callback)

    @asynccontextmanager
    async def subscription(self, subject: str, handler: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """Pass messages to `handler`, one at a time; it must not block."""
        with translated_nats_errors(subject, self.url):
            subscription = await self.client.subscribe(
                subject, cb=handler, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=PENDING_BYTES
            )
        try:
            with translated_nats_errors(subject, self.url):
                await self.flush()  # NATS must know the subscription before a request
            yield
        finally:
            # even while disconnected, because nats-py renews all its subscriptions after an outage
            with suppress(nats.errors.Error, OSError, RuntimeError, AttributeError), exact_cancellation():
                await subscription.unsubscribe()

    async def flush(self) -> None:
        """Wait until NATS has processed everything sent before.

        nats-py writes PING ahead of queued commands, so the first answer proves that they were written, the second that they
        were processed.
        Raises: nats.errors.Error, OSError.
        """
        with exact_cancellation():
            await self.client.flush()
            await self.client.flush()

    def check_size(self, subject: str, data: bytes, what: str = "message") -> None:
        """Raises: MessageTooLarge, if NATS would refuse `data`."""
        if len(data) > self.client.max_payload - HEADERS_BYTES:
            error = MessageTooLarge(
                f"{what} of {len(data)} bytes for {subject} exceeds the {self.client.max_payload} bytes "
                "that this NATS server accepts: raise max_payload there (kvmesh ships 8 MB)",
                bytes=len(data),
            )
            self.refusals.count("sent", error)
            raise error

    def _packed(self, subject: str, message: Struct) -> bytes:
        data = pack(message)
        self.check_size(subject, data, type(message).__name__)
        return data
