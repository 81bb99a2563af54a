"""A server that is about to stop announces it in its answers, and no request on a kept connection is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from components.http.server import serve_http
from tests.components.http.served import GET, Address
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

CLOSES = b"\r\nconnection: close\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"


class Streams:
    """`/stream` sends its head, and ends when `end` is set; other paths answer at once."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.end.wait()
        await send({"type": "http.response.body", "body": b"ended"})


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, request: bytes = GET) -> bytes:
        """Return head and body of the response."""
        self.writer.write(request)
        return await self.reader.readuntil(b"\r\n0\r\n\r\n")

    async def is_closed(self) -> bool:
        return await self.reader.read() == b""


class Leaving:
    def __init__(self, share_port: bool) -> None:
        self.app = Streams()
        self.leaving = asyncio.Event()
        self.stop = asyncio.Event()
        self._share_port = share_port
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        address = Address(drain_timeout_s=1000.0)
        async with serve_http(self.app, address, share_port=self._share_port, leaving=self.leaving) as url:
            self._port.set_result(int(url.rpartition(":")[2]))
            await self.stop.wait()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client(*await asyncio.open_connection("127.0.0.1", await self._port))
        try:
            yield client
        finally:
            client.writer.close()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Client]:
        """Start a stream, whose head must not announce a close."""
        async with self.client() as client:
            client.writer.write(STREAM)
            assert CLOSES not in await client.reader.readuntil(b"begun\r\n")
            yield client


@pytest.fixture(params=[False, True], ids=["own port", "shared port"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Leaving]:
    leaving = Leaving(request.param)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(leaving.serve())
        yield leaving
        leaving.app.end.set()
        leaving.stop.set()


async def leave(server: Leaving) -> None:
    server.leaving.set()
    await asyncio.sleep(0.05)


async def test_until_it_leaves_connections_are_kept(server: Leaving) -> None:
    async with server.client() as client:
        for _ in range(3):
            assert CLOSES not in await client.ask()


async def test_answers_of_a_leaving_server_end_their_connections_old_and_new(server: Leaving) -> None:
    async with server.client() as kept, server.client() as silent:
        await kept.ask()
        await leave(server)
        for client in (kept, silent):
            assert CLOSES in await client.ask()
            assert await client.is_closed()
        async with server.client() as new:
            assert CLOSES in await new.ask()
            assert await new.is_closed()


async def test_a_stream_that_began_before_may_be_followed_by_one_request(server: Leaving) -> None:
    """The close was not announced, so the client sends it when its stream ends."""
    async with server.stream() as client:
        await leave(server)
        server.app.end.set()
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        assert CLOSES in await client.ask()
        assert await client.is_closed()


async def test_a_stop_just_after_the_stream_lets_that_request_come(server: Leaving) -> None:
    async with server.stream() as client:
        await leave(server)
        server.app.end.set()
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        server.stop.set()
        await asyncio.sleep(0.3)
        assert CLOSES in await client.ask()
        assert await client.is_closed()


async def test_a_stop_during_the_stream_lets_that_request_come(server: Leaving) -> None:
    async with server.stream() as client:
        server.stop.set()
        await asyncio.sleep(0.3)
        server.app.end.set()
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        await asyncio.sleep(0.3)
        assert CLOSES in await client.ask()
        assert await client.is_closed()


async def test_a_stop_waits_for_that_request_no_longer_than_it_must(server: Leaving) -> None:
    async with server.stream() as client, server.client() as idle:
        await idle.ask()
        await leave(server)
        server.stop.set()
        assert await idle.is_closed()
        server.app.end.set()
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        assert await client.is_closed()
