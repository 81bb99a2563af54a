"""Connects a process to NATS, and keeps the connection."""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import nats.errors
from nats.aio.client import Client

from components.aio import background, exact_cancellation
from components.credentials import NatsAccess
from components.errors import BackendUnavailable
from components.messaging.bus import MAX_PINGS, PING_EVERY_S, Bus
from components.messaging.nats_errors import unreachable
from components.messaging.secure_client import ANYONE, SecureClient
from components.telemetry.waiting import waiting_logged
from components.urls import without_password

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 2
RETRY_EVERY_S: Final = 0.5
WATCH_EVERY_S: Final = 1.0


@asynccontextmanager
async def connect_bus(
    url: str, name: str, access: NatsAccess = ANYONE, failed: Callable[[Exception], object] = lambda _: None
) -> AsyncIterator[Bus]:
    """Connect, and reconnect automatically. If NATS is unreachable at the start, wait and log.

    Raises: WrongSettings; BackendUnavailable, also in the body, if the connection is closed for good.

    Args:
        url: comma-separated.
        name: shown in NATS's monitoring.
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
    """Chooses the server not tried for the longest time, so a frozen one is not tried repeatedly."""

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

    Raises: BackendUnavailable, if the client has closed itself: the process must end.
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
