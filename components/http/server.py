"""uvicorn's server, with client limits and a drain that loses no connection.

`connection.py` and this module override private parts of uvicorn; pyproject.toml lists them.
"""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, Protocol, cast

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from components.aio import background
from components.http.connection import Connection, check_connections
from components.http.limits import (
    ClientLimits,
    CloseCounter,
    OpenConnections,
    WriteRefusal,
    max_connections,
    plain_refusal,
)
from components.http.listening import BACKLOG, bind, has_connections, refuse_connections, url_of
from components.http.tls import Tls, TlsListener, followed_context
from components.http.writer import HeldWrites

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 75  # longer than clients keep connections, so no request meets a close
LAST_HANDSHAKES_S: Final = 0.1  # for TCP handshakes
LAST_REQUESTS_S: Final = 1.0  # for requests on open connections
LAST_ANSWERS_S: Final = 0.5  # for answers that outlive the drain timeout
TICK_S: Final = 0.005
DATE_S: Final = 1.0


class ListenSettings(Protocol):
    @property
    def host(self) -> str:
        pass

    @property
    def port(self) -> int:
        """0: any free port."""

    @property
    def drain_timeout_s(self) -> float:
        pass


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, connections: OpenConnections, tls: TlsListener | None, *, shares_port: bool
    ) -> None:
        super().__init__(config)
        self._served = cast("set[Connection]", self.server_state.connections)
        connections.served = self._served
        self._connections = connections
        self._tls = tls
        self.listening = asyncio.Event()
        self.ending = asyncio.Event()
        self._shares_port = shares_port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self._tls is None else [])
        if self._tls is not None:
            for listener in sockets or ():
                self._tls.start(listener, self._new_connection)
        self.listening.set()

    def _new_connection(self) -> Connection:
        made: Connection = cast("partial[Connection]", self.config.http_protocol_class)(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def main_loop(self) -> None:
        """Wait for `ending`; uvicorn polls ten times a second."""
        while not self.ending.is_set():
            await self.on_tick(0)  # sets the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self.ending.wait()

    def leave(self) -> None:
        """Serve, but close each connection after its next answer."""
        if not self._connections.leaving:
            self._connections.leaving = True
            for connection in list(self._served):
                connection.leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.leave()
        await self._stop_listening(sockets or [])
        await self._last_requests()
        if self._tls is not None:
            await self._tls.close()
        for connection in list(self._served):
            connection.shutdown()
        await asyncio.sleep(TICK_S)
        if self._served or self.server_state.tasks:
            await self._drain()

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Close the listening socket, after accepting waiting connections, which a close would reset."""
        began = time.monotonic()
        if self._shares_port:
            for listener in sockets:
                refuse_connections(listener)
        while (waited_s := time.monotonic() - began) < 2 * LAST_HANDSHAKES_S:
            handshakes = self._shares_port and waited_s < LAST_HANDSHAKES_S
            if not handshakes and not any(map(has_connections, sockets)):
                break
            await asyncio.sleep(TICK_S)
        for server in self.servers:
            server.close()
        if self._tls is not None:
            await self._tls.stop()
        for listener in sockets:
            listener.close()

    async def _last_requests(self) -> None:
        """Wait for requests on new connections, and on idle ones if the port is shared.

        Else an idle client's next request fails anyway.
        """
        until = time.monotonic() + min(LAST_REQUESTS_S, self.config.timeout_graceful_shutdown or 0)
        while time.monotonic() < until:
            waited_for = any(self._may_send_request(connection) for connection in self._served)
            if not waited_for and not self._connections.has_handshakes:
                return
            await asyncio.sleep(TICK_S)

    async def _drain(self) -> None:
        """Wait for requests in flight. Those that outlive the drain timeout are cancelled, and may still send an error."""
        if await self._ends_within(self.config.timeout_graceful_shutdown or 0):
            return
        tasks = list(self.server_state.tasks)
        if tasks:
            log.warning("requests cancelled: the drain time has ended", extra={"requests": len(tasks)})
        for connection in list(self._served):
            connection.finish()
        for task in tasks:
            task.cancel()
        if not await self._ends_within(LAST_ANSWERS_S):
            for connection in list(self._served):
                connection.transport.abort()
            await asyncio.sleep(TICK_S)  # lets requests end that waited for their client

    async def _ends_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._served or self.server_state.tasks:
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(TICK_S)
        return True

    def _may_send_request(self, connection: Connection) -> bool:
        cycle = connection.cycle
        return cycle is None or (cycle.response_complete and self._shares_port)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve_http(
    app: ASGIApp,
    settings: ListenSettings,
    *,
    options: str = "--",
    share_port: bool = False,
    tls: Tls | None = None,
    limits: ClientLimits = ClientLimits(),  # noqa: B008 - a frozen value
    refusal: WriteRefusal = plain_refusal,
    registry: CollectorRegistry | None = None,
    writes: HeldWrites | None = None,
    leaving: asyncio.Event | None = None,
) -> AsyncGenerator[str, None]:
    """Serve `app` and yield its URL once it listens.

    On exit, requests in flight get `drain_timeout_s` to finish. A client whose answer began before may send one more request.

    Args:
        options: how the names of the options for host and port begin, for an error.
        share_port: other processes of this user may listen on the port too; the kernel distributes connections.
        tls: serve https with these; a new connection uses what the files then hold.
        refusal: writes the answers to requests that never reach `app`.
        registry: for a counter of closed connections by reason.
        writes: to hold writes during a turn of the loop.
        leaving: once set, before the exit, each answer has `Connection: close`, so that clients leave.
    Raises: CannotServe, if the address cannot be bound; WrongSettings, if a file of `tls` cannot be used.
    """
    contexts = None if tls is None else followed_context(tls)
    listener = bind(settings.host, settings.port, share_port=share_port, options=options)
    closed = CloseCounter(registry)
    connections = OpenConnections(limits.connections or max_connections(), closed)
    protocol = partial(Connection, limits, connections, closed, writes or HeldWrites(), refusal)
    secured = None if contexts is None else TlsListener(contexts, limits, connections, closed)
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s),
    )
    server = _Server(config, connections, secured, shares_port=share_port)
    async with (
        background(check_connections(server.server_state.connections, limits), "connections"),
        background(_leave(server, leaving or server.ending), "leaving"),
    ):
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            await _listening(server, serving)
            yield url_of(listener, "http" if tls is None else "https")
        finally:
            server.ending.set()
            await serving
            listener.close()


async def _leave(server: _Server, leaving: asyncio.Event) -> None:
    await leaving.wait()
    server.leave()


async def _listening(server: _Server, serving: asyncio.Task[None]) -> None:
    event = asyncio.create_task(server.listening.wait())
    await asyncio.wait({event, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not event.done():
        event.cancel()
        serving.result()
