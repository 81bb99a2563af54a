"""A small application behind a real server."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry

from components.http.connection import PUSH, BodyPush
from components.http.limits import ClientLimits, Closed
from components.http.server import serve_http
from components.http.tls import Tls
from components.http.writer import HeldWrites
from components.openai.errors import http_refusal
from tests.waiting import PATIENCE_S, until

LIMITS: Final = ClientLimits(
    head_bytes=4096, head_s=0.2, body_s=0.2, bytes_per_s=1000, first_s=0.2, unread_s=0.3, check_every_s=0.02
)
GET: Final = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PIECE: Final = b"x" * 16_384


@dataclass(frozen=True, slots=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 0
    drain_timeout_s: float = 1.0


class App:
    """Reads a body, and returns its size.

    `/endless` writes until the client has gone. `/pushed` lets the test write. `/headers` returns the request's headers.
    `/refused` is answered before the body is read.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.left = asyncio.Event()
        self.pushes: list[BodyPush] = []
        self.written = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        size, more = 0, True
        if scope["path"] != "/refused":
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.left.set()
                    return
                size, more = size + len(message["body"]), message["more_body"]
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            watcher = asyncio.create_task(receive())
            while not watcher.done():
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                self.written += len(PIECE)
                await asyncio.sleep(0)
            self.left.set()
            return
        if scope["path"] == "/pushed":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            self.pushes.append(scope[PUSH])
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        body = str(size).encode()
        if scope["path"] == "/headers":
            body = b" ".join([*(b"%b=%b" % header for header in scope["headers"]), b"%d." % size])
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Served:
    def __init__(
        self, url: str, app: App, registry: CollectorRegistry, writes: HeldWrites, trust: ssl.SSLContext | None
    ) -> None:
        self.app = app
        self.writes = writes
        self._registry = registry
        self.port = int(url.rpartition(":")[2])
        self._trust = trust

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=2**16, ssl=self._trust, server_hostname=self._trust and "localhost"
        )
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(self, request: bytes) -> bytes:
        """Return all bytes until the server closes."""
        async with asyncio.timeout(PATIENCE_S), self.client() as (reader, writer):
            writer.write(request)
            return await reader.read()

    async def answers(self) -> None:
        """Check that a request is served."""
        async with asyncio.timeout(PATIENCE_S), self.client() as (reader, writer):
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")

    def closed(self, why: Closed) -> float:
        return self._registry.get_sample_value("kvmesh_http_connections_closed_total", {"reason": why}) or 0.0

    async def until_closed(self, why: Closed, count: int = 1) -> None:
        await until(lambda: self.closed(why) >= count)


@asynccontextmanager
async def served(limits: ClientLimits = LIMITS, tls: Tls | None = None) -> AsyncIterator[Served]:
    app, registry, writes = App(), CollectorRegistry(), HeldWrites()
    trust = None if tls is None else ssl.create_default_context(cafile=tls.certificate)
    async with serve_http(
        app, Address(), tls=tls, limits=limits, refusal=http_refusal, registry=registry, writes=writes
    ) as url:
        yield Served(url, app, registry, writes, trust)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"\r\nconnection: close" in head
    assert b"\r\nx-request-id: " in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)
