"""uvicorn inside a running event loop: somebody else owns the signals."""

import asyncio
import math
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than clients keep a connection: the server must not close it under a request


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
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve_http(app: ASGIApp, settings: Listener) -> AsyncGenerator[str, None]:
    """Serve `app` and yield its URL once it listens.

    Leaving stops listening at once and gives requests in flight `drain_timeout_s` to end.

    Raises: OSError, when the address cannot be bound, saying what to do.
    """
    listener = _bind(settings.host, settings.port)
    config = uvicorn.Config(
        app,
        http="httptools",
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
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await _listening(server, serving)
        yield _url(listener)
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def _listening(server: _Server, serving: asyncio.Task[None]) -> None:
    """Wait until `server` listens; if it ends instead, raise what ended it."""
    event = asyncio.create_task(server.listening.wait())
    await asyncio.wait({event, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not event.done():
        event.cancel()
        serving.result()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted sockets inherit it: each write is a token that somebody waits for
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        cause = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else str(exc)
        raise OSError(
            exc.errno,
            f"cannot listen on {host}:{port}: {cause}; stop what uses the address, or choose another with "
            "--port or --host (of a worker: --metrics-port)",
        ) from exc
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"http://{shown}:{port}"
