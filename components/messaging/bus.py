"""One NATS connection: calls, publications and subscriptions. NATS's errors become MeshErrors."""

import asyncio
import logging
import math
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from components.aio import background, exact_cancellation
from components.credentials import NatsAccess
from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    ListenerGone,
    MalformedMessage,
    MeshError,
    MessageTooLarge,
    NobodyListens,
)
from components.local_mesh import ENV_OF_LOCAL_MESH
from components.messaging.clocks import PeerClocks
from components.messaging.refusals import Refusals
from components.messaging.replies import Replies, RespondersGone, publish
from components.messaging.secure_client import ANYONE, SecureClient, TlsRefused
from components.telemetry.spans import trace_headers
from components.telemetry.waiting import waiting_logged
from components.urls import without_password
from components.wire.codec import Struct, pack, unpack
from components.wire.refused import Refused, raised

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Struct)

CONNECT_TIMEOUT_S: Final = 2
# Disconnect from a silent server after 1.6 s, before peers count this process as silent. nats-py's default is four minutes.
PING_EVERY_S: Final = 0.4
MAX_PINGS: Final = 3  # unanswered
RETRY_EVERY_S: Final = 0.5
WATCH_EVERY_S: Final = 1.0
PENDING_MESSAGES: Final = 1 << 20  # a subscription silently drops messages beyond this; frame numbers reveal it
PENDING_BYTES: Final = 1 << 30
HEADERS_BYTES: Final = 512  # headers count, too: NATS closes the connection for one byte too many


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
        """Seconds since the latest reconnect; infinite if there was none, 0 while disconnected."""
        # nats-py reports itself as connected before it calls us; answers to calls that waited for NATS arrive in between
        if not self.client.is_connected or self.disconnected_s > self.reconnected_s:
            return 0.0
        return time.monotonic() - self.reconnected_s

    def contact_age_s(self) -> float:
        """Seconds since NATS last answered a ping, in steps of PING_EVERY_S."""
        if self.client.is_connected:
            return float(self.client._pings_outstanding) * PING_EVERY_S
        return time.monotonic() - self.disconnected_s + MAX_PINGS * PING_EVERY_S

    def answers(self) -> AbstractAsyncContextManager[None]:
        return self.subscription(self._replies.subject, self._replies.receive)

    async def call(self, subject: str, request: Struct, *replies: type[S], timeout_s: float) -> S:
        """Send `request` and return the answer, one of the classes `replies`.

        Raises: PeerLost at once if no process listens; DeadlineExceeded after `timeout_s`; BackendUnavailable if
        NATS was unreachable during the call; MessageTooLarge; the error that the receiver answered with.
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
        """Return a reply subject for messages to `subject`, for which NATS calls `callback` at once if no process listens.

        A new callback replaces the earlier one.
        """
        return self._replies.on_no_responders(subject, callback)

    @asynccontextmanager
    async def subscription(self, subject: str, handler: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """Pass each message of `subject` to `handler`, one at a time; it must not block."""
        with translated_nats_errors(subject, self.url):
            subscription = await self.client.subscribe(
                subject, cb=handler, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=PENDING_BYTES
            )
        try:
            with translated_nats_errors(subject, self.url):
                await self.flush()  # NATS must know the subscription before any request is sent
            yield
        finally:
            # even while disconnected, because nats-py renews all its subscriptions after an outage
            with suppress(nats.errors.Error, OSError, RuntimeError, AttributeError), exact_cancellation():
                await subscription.unsubscribe()

    async def flush(self) -> None:
        """Wait until NATS has processed everything sent before.

        nats-py writes PING ahead of queued commands. So the first answer proves that they were written, the second
        that they were processed.

        Raises: nats.errors.Error, OSError.
        """
        with exact_cancellation():
            await self.client.flush()
            await self.client.flush()

    def check_size(self, subject: str, data: bytes, what: str = "message") -> None:
        """Raise MessageTooLarge if NATS would refuse `data`."""
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


class translated_nats_errors:  # noqa: N801 - a `contextmanager` function takes three times as long, per message
    """Context manager that turns nats-py's exceptions into MeshErrors."""

    __slots__ = ("_subject", "_url")

    def __init__(self, subject: str, url: str) -> None:
        self._subject = subject
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (mesh_error := _to_mesh_error(error, self._subject, self._url)) is not None:
            raise mesh_error from error


def _to_mesh_error(error: BaseException, subject: str, url: str) -> MeshError | None:
    if isinstance(error, nats.errors.NoRespondersError):
        kind, when = (ListenerGone, " any more") if isinstance(error, RespondersGone) else (NobodyListens, "")
        return kind(f"no process listens on {subject}{when}", subject=subject)
    if isinstance(error, nats.errors.TimeoutError | TimeoutError):
        return DeadlineExceeded(f"no answer on {subject} in time", subject=subject)
    if isinstance(error, nats.errors.MaxPayloadError):
        return MessageTooLarge(f"message for {subject} exceeds the server's max_payload", subject=subject)
    if isinstance(error, nats.errors.BadSubjectError):
        return MalformedMessage(f"{subject[:80]!r} is not a valid NATS subject", subject=subject[:80])
    # nats-py does not catch uvloop's error for a reset socket, nor errors of its own half-closed state
    if isinstance(error, nats.errors.Error | OSError | RuntimeError | AttributeError):
        return BackendUnavailable(unreachable(url, error), subject=subject)
    return None


def unreachable(url: str, exc: BaseException) -> str:
    cause = str(exc) or type(exc).__name__
    where = without_password(url)
    if "authorization" in cause.lower():
        return (
            f"NATS at {where} refuses this login ({cause}): set MESH_NATS_URL=nats://user:password@host:port, or "
            "MESH_NATS_LOGIN_FILE to a file with user:password"
        )
    if isinstance(exc, TlsRefused):
        return f"NATS at {where} is not used: {cause}"
    if isinstance(exc, ssl.SSLError):
        return (
            f"NATS at {where} and this process do not agree on TLS ({cause}): MESH_TLS__CA must have signed NATS's "
            "certificate, which must name this host; MESH_TLS__CERTIFICATE must be one that NATS accepts"
        )
    # with TLS 1.3 a server refuses a client's certificate after the handshake, by closing
    tls = "; if it runs, MESH_TLS__CERTIFICATE must be one that it accepts" if "tls://" in url else ""
    return f"NATS at {where} cannot be reached ({cause}): start one, or set MESH_NATS_URL; {ENV_OF_LOCAL_MESH}{tls}"


@asynccontextmanager
async def connect_bus(
    url: str, name: str, access: NatsAccess = ANYONE, failed: Callable[[Exception], object] = lambda _: None
) -> AsyncIterator[Bus]:
    """Connect, and reconnect automatically. If NATS is unreachable at the start, wait and log.

    Raises: WrongSettings; BackendUnavailable, also within the `with` body, if the connection is closed for good.

    Args:
        url: server addresses, comma-separated.
        name: client name in NATS's monitoring.
        access: login and TLS files, which are read again for each connection.
        failed: called with the error of each attempt to connect.
    """
    reports = _ConnectionReports(url, failed)
    async with waiting_logged("NATS", url):
        client = await _connect(url, name, access, reports)
    bus = reports.bus = Bus(client, url)
    try:
        async with background(_watch(client, url), "nats-watch"), bus.answers():
            yield bus
    finally:
        reports.closing = True
        await _close(client)


class _ConnectionReports:
    """Logs a NATS outage once, because nats-py reports every reconnect attempt."""

    def __init__(self, url: str, failed: Callable[[Exception], object] = lambda _: None) -> None:
        self.closing = False
        self.bus: Bus | None = None
        self._url = url
        self._failed = failed
        self._away = True
        self._has_reported = False

    async def on_error(self, exc: Exception) -> None:
        if not self._away:
            log.warning("NATS client error", extra={"cause": str(exc) or type(exc).__name__})
        elif not self.closing:
            self._failed(exc)
            level = logging.DEBUG if self._has_reported else logging.ERROR
            log.log(level, "NATS cannot be reached, trying again", extra={"reason": unreachable(self._url, exc)})
            self._has_reported = True

    async def on_disconnected(self) -> None:
        if self.bus is not None and not self._away:
            self.bus.disconnected_s = time.monotonic()
        self._away = True

    async def on_connected(self) -> None:
        if self._has_reported:
            log.info("NATS connected", extra={"url": without_password(self._url)})
        if self.bus is not None:
            self.bus.reconnected_s = time.monotonic()
        self._away = self._has_reported = False


class _ServerChoice:
    """Chooses the server that was not tried for the longest time, so a frozen one is not tried repeatedly."""

    def __init__(self) -> None:
        self._tried: dict[str, float] = {}  # monotonic time by host and port
        self._every_s = RETRY_EVERY_S * random.uniform(0.5, 1.0)  # jitter, so that processes do not retry in step

    def connected(self, client: Client) -> None:
        if (url := client.connected_url) is not None:
            self._tried[url.netloc] = time.monotonic()

    def __call__(self, servers: list[Any], _info: object) -> tuple[Any, float]:
        now = time.monotonic()
        server = min(servers, key=lambda s: (self._tried.get(s.uri.netloc, -math.inf), random.random()))
        wait_s = max(0.0, self._tried.get(server.uri.netloc, -math.inf) + self._every_s - now)
        self._tried[server.uri.netloc] = now + wait_s
        return server, wait_s


async def _connect(url: str, name: str, access: NatsAccess, reports: "_ConnectionReports") -> Client:
    choice = _ServerChoice()
    while True:
        client = SecureClient(url, access)
        connected = partial(_connected, client, choice, reports)
        try:
            with exact_cancellation():
                await client.connect(
                    without_password(url).split(","),
                    name=name,
                    **client.login_options(),
                    connect_timeout=CONNECT_TIMEOUT_S,
                    ping_interval=PING_EVERY_S,
                    max_outstanding_pings=MAX_PINGS,
                    max_reconnect_attempts=-1,
                    allow_reconnect=True,
                    reconnect_to_server_handler=choice,
                    error_cb=reports.on_error,
                    disconnected_cb=reports.on_disconnected,
                    reconnected_cb=connected,
                )
        except asyncio.CancelledError:
            await _close(client)
            raise
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            await reports.on_error(exc)
            await asyncio.sleep(RETRY_EVERY_S)
        else:
            await connected()
            return client


async def _connected(client: SecureClient, choice: _ServerChoice, reports: "_ConnectionReports") -> None:
    choice.connected(client)
    await reports.on_connected()
    await client.ping_again()


async def _watch(client: Client, url: str) -> None:
    """Restart nats-py's reconnect task if it ends.

    Raises: BackendUnavailable, if the client has closed itself: the process must then end.
    """
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        if client.is_closed:
            cause = client.last_error or nats.errors.ConnectionClosedError()
            raise BackendUnavailable(unreachable(url, cause))
        reconnecting = client._reconnection_task
        if not client.is_connected and (reconnecting is None or reconnecting.done()):
            # uvloop raises RuntimeError for a socket reset within a handshake, which ends nats-py's task
            log.warning("reconnecting to NATS failed, trying again", extra={"url": without_password(url)})
            client._status = Client.CONNECTING
            await client._process_op_err(nats.errors.StaleConnectionError())


async def _close(client: Client) -> None:
    try:
        if client.is_connected:
            with exact_cancellation():
                await client.flush(timeout=2)
    except (nats.errors.Error, OSError, TimeoutError):
        log.warning("NATS was lost before the last messages were sent")
    finally:
        if not client.is_connected:  # close() would write unsent messages to the closed socket, and fail
            client._pending, client._pending_data_size = [], 0
        with exact_cancellation():  # close() cancels a reconnecting task that waits for the same socket
            await client.close()
