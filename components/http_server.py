"""uvicorn inside a running event loop: somebody else owns the signals."""

import asyncio
import contextlib
import ctypes
import math
import select
import socket
import struct
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, Protocol, cast

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from components.aio import background
from components.http_connection import Connection, look_at_connections
from components.http_limits import Closures, Patience, most_connections
from components.http_room import Room
from components.http_tls import TlsListener
from components.http_writer import HeldWrites
from components.listening import cannot_listen
from components.startup import CannotServe
from components.tls import Tls, tls_context

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75  # longer than clients keep a connection: the server must not close it under a request
LAST_HANDSHAKES_S: Final = 0.1  # from a client's first packet to its connection, as far as we wait for it
LAST_REQUESTS_S: Final = 1.0  # for a request on a connection that is open already
TICK_S: Final = 0.005
DATE_S: Final = 1.0  # how long the date of answers may stand
# Of a connection in the kernel, which takes twice that: what may wait unread there.
SEND_BUFFER_BYTES: Final = 256 * 1024
SO_ATTACH_FILTER: Final = 26  # of Linux; Python has no name for it
NO_NEW_CONNECTION: Final = (  # a socket filter, classic BPF, that sees packets from their TCP header on
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x45, 0, 1, 0x02),  # is SYN among them?
    (0x06, 0, 0, 0),  # then drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else take it
)


class Listener(Protocol):
    """Where to listen, and how long a stop may take; a service's settings are one."""

    @property
    def host(self) -> str:
        """Address."""

    @property
    def port(self) -> int:
        """0: any free one."""

    @property
    def drain_timeout_s(self) -> float:
        """For requests in flight."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, room: Room, tls: TlsListener | None, *, shares_port: bool) -> None:
        super().__init__(config)
        room.connections = self.server_state.connections
        self._room = room
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
        """As uvicorn makes them."""
        made: Connection = cast("partial[Connection]", self.config.http_protocol_class)(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def main_loop(self) -> None:
        """Until `ending`; uvicorn's own asks ten times a second whether it is over."""
        while not self.ending.is_set():
            await self.on_tick(0)  # sets the date of answers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # from now on each answer says that the next request must go elsewhere; those being made share this list
        self.server_state.default_headers.append((b"connection", b"close"))
        await self._stop_listening(sockets or [])
        await self._last_requests()
        if self._tls is not None:
            await self._tls.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(TICK_S)  # in which those without a request close
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)  # waits for at least 0.1 s

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """The kernel resets connections that nobody has accepted when their socket closes: take them in first."""
        began = time.monotonic()
        if self._shares_port:
            for listener in sockets:
                _take_no_more(listener)
        while (waited_s := time.monotonic() - began) < 2 * LAST_HANDSHAKES_S:
            handshakes = self._shares_port and waited_s < LAST_HANDSHAKES_S
            if not handshakes and not any(map(_has_connections, sockets)):
                break
            await asyncio.sleep(TICK_S)
        for server in self.servers:
            server.close()
        if self._tls is not None:
            await self._tls.stop()
        for listener in sockets:
            listener.close()

    async def _last_requests(self) -> None:
        """Answer what comes on connections that are open.

        A new connection has brought no request yet. One that has served before is waited for only where others listen on
        the port: elsewhere its client's next request fails now or later.
        """
        until = time.monotonic() + min(LAST_REQUESTS_S, self.config.timeout_graceful_shutdown or 0)
        while time.monotonic() < until:
            waited_for = [connection for connection in self.server_state.connections if self._may_ask(connection)]
            if not waited_for and not self._room.has_handshakes:
                return
            await asyncio.sleep(TICK_S)

    def _may_ask(self, connection: object) -> bool:
        """Whether a request may come on this connection; one whose request is being answered ends with that."""
        cycle = getattr(connection, "cycle", None)  # the request that uvicorn read last
        if cycle is None:
            return True
        if cycle.response_complete:
            return self._shares_port
        cycle.keep_alive = False
        return False

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve_http(
    app: ASGIApp,
    settings: Listener,
    *,
    share_port: bool = False,
    tls: Tls | None = None,
    patience: Patience = Patience(),  # noqa: B008 - a frozen value
    registry: CollectorRegistry | None = None,
    writes: HeldWrites | None = None,
) -> AsyncGenerator[str, None]:
    """Serve `app` and yield its URL once it listens.

    Leaving stops listening at once, without losing a connection that was made before, and gives requests in flight
    `drain_timeout_s` to end.

    Args:
        app: what to serve.
        settings: where, and for how long after the end.
        share_port: with other processes of this user that share it too; the kernel deals connections out among them.
        tls: serve https with these.
        patience: with slow clients.
        registry: shows how many connections were closed, and why.
        writes: to hold what is sent in one turn of the loop.
    Raises: CannotServe, when the address cannot be bound; WrongSettings, when a file of `tls` cannot be used.
    """
    context = None if tls is None else tls_context(tls)
    listener = _bind(settings.host, settings.port, share_port=share_port)
    closures = Closures(registry)
    room = Room(patience.connections or most_connections(), closures)
    protocol = partial(Connection, patience, room, closures, writes or HeldWrites())
    secured = None if context is None else TlsListener(context, patience, room, closures)
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # it is called, never subclassed
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
    server = _Server(config, room, secured, shares_port=share_port)
    async with background(look_at_connections(server.server_state.connections, patience), "connections"):
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            await _listening(server, serving)
            yield _url(listener, "http" if tls is None else "https")
        finally:
            server.ending.set()
            await serving
            listener.close()


async def _listening(server: _Server, serving: asyncio.Task[None]) -> None:
    """Wait until `server` listens; if it ends instead, raise what ended it."""
    event = asyncio.create_task(server.listening.wait())
    await asyncio.wait({event, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not event.done():
        event.cancel()
        serving.result()


def _bind(host: str, port: int, *, share_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # accepted sockets inherit it: each write is a token that somebody waits for
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # only now is the port ours: two sockets may be bound to it
    except OSError as exc:
        listener.close()
        raise CannotServe(cannot_listen(host, port, exc)) from exc
    listener.setblocking(False)
    return listener


def _has_connections(listener: socket.socket) -> bool:
    """Whether connections wait to be accepted."""
    queue = select.poll()
    queue.register(listener, select.POLLIN)
    return bool(queue.poll(0))


def _take_no_more(listener: socket.socket) -> None:
    """Have the kernel drop packets that would open a connection here.

    Their senders repeat them after a second, and are then served by another process that listens on the port: the kernel
    has no way to leave the group but closing, which resets those in the middle of a handshake.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in NO_NEW_CONNECTION)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(NO_NEW_CONNECTION), ctypes.addressof(buffer))
    with contextlib.suppress(OSError):  # a system without filters closes as it is
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"{scheme}://{shown}:{port}"
