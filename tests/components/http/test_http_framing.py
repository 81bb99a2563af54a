"""Chunk sizes, extensions, trailers and pipelined requests, on real sockets."""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any, Final

import pytest

from components.http.connection import Connection
from components.http.limits import ClientLimits, Closed
from tests.components.http.served import GET, LIMITS, Served, error_of, served
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

CHUNKED: Final = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SOME: Final = replace(LIMITS, body_s=1000.0, head_s=1000.0)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


async def sent_until_closed(server: Served, begin: bytes, more: bytes, most: int) -> tuple[int, bytes]:
    """Send `begin`, then `more` repeatedly. Return the number of accepted bytes of `more`, and the response."""
    sent = 0
    async with asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        answer = asyncio.create_task(reader.read())
        with contextlib.suppress(OSError):
            writer.write(begin)
            while sent < most and not answer.done():
                writer.write(more)
                await writer.drain()
                sent += len(more)
                await asyncio.sleep(0)
            writer.write_eof()
        return sent, await answer


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"".join(b"a%d: b\r\n" % i for i in range(5000))),
        (b"0\r\nx: ", b"y" * 65_536),
        (b"1;x=", b"y" * 65_536),
        (b"", b"1;" + b"y" * 500 + b"\r\na\r\n"),
    ],
    ids=["trailers", "one trailer", "one extension", "many extensions"],
)
@pytest.mark.parametrize("path", [b"/", b"/refused"])
async def test_endless_framing_is_431_or_ends_what_is_answered_already(path: bytes, begin: bytes, more: bytes) -> None:
    """Trailers were kept as headers: 100 MB of them took 2 GB. One of 60 MB blocked the event loop for 2.8 s."""
    async with served(SOME) as server:
        sent, answer = await sent_until_closed(server, CHUNKED % path + begin, more, 64 * 2**20)
        assert server.closed(Closed.FRAMING_TOO_LARGE) == 1
        assert sent < 32 * 2**20, "what the kernel's buffers hold, and what is dropped so that the answer can be read"
        if path == b"/":
            assert "trailers" in error_of(answer, 431)["message"]
        else:
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"\r\n\r\n0")
        await server.answers()


async def test_what_follows_an_answer_is_bounded_and_the_answer_can_be_read() -> None:
    async with served(replace(SOME, rest_bytes=2**20)) as server:
        for head in (b"content-length: 99999999", b"connection: close\r\ncontent-length: 99999999"):
            begin = b"POST /refused HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % head
            sent, answer = await sent_until_closed(server, begin, b"x" * 65_536, 64 * 2**20)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"\r\n\r\n0")
            assert sent < 32 * 2**20
        assert server.closed(Closed.REST_TOO_LARGE) == 1


async def test_a_body_that_ends_shortly_after_its_answer_keeps_the_connection_open() -> None:
    async with served(SOME) as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        writer.write(b"x" * 100_000 + GET)
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")


async def test_a_body_in_chunks_of_one_byte_is_read() -> None:
    async with served(SOME) as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(CHUNKED % b"/" + b"1\r\na\r\n" * 20_000 + b"0\r\nx-sum: 7\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n20000")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("cut", [None, 1, 7, 100])
async def test_trailers_are_no_headers(cut: int | None) -> None:
    """With the body in one segment, trailers became headers: an API key in a trailer was accepted."""
    request = CHUNKED % b"/headers" + b"3\r\nabc\r\n0\r\nauthorization: Bearer a\r\nhost: evil\r\nx: y\r\n\r\n"
    async with served(SOME) as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        for at in range(0, len(request), cut or len(request)):
            writer.write(request[at : at + (cut or len(request))])
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.readuntil(b"3.")
        assert answer.endswith(b"host=x transfer-encoding=chunked 3.")


async def test_requests_one_behind_the_other_cost_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request copied the list of those before it: 14,000, 252 kB, blocked the event loop for 3.4 s."""
    longest_s = 0.0
    received = Connection.data_received

    def timed(self: Connection, data: bytes) -> None:
        nonlocal longest_s
        began = time.process_time()
        received(self, data)
        longest_s = max(longest_s, time.process_time() - began)

    monkeypatch.setattr(Connection, "data_received", timed)
    async with (
        served(ClientLimits(requests=10**6)) as server,
        asyncio.timeout(PATIENCE_S),
        server.client() as (reader, writer),
    ):
        seconds = []
        for count in (1000, 8000):
            longest_s = 0.0
            writer.write(GET * count)
            answers = 0
            while answers < count:
                answers += (await reader.read(2**20)).count(b"HTTP/1.1 200")
            seconds.append(longest_s)
        assert seconds[1] < 30 * seconds[0], "8 times as many requests, at most; it was more than 64 times as long"


async def test_too_many_unanswered_requests_end_their_connection() -> None:
    async with served() as server:
        answer = await server.ask(GET * 14_000)
        assert answer.count(b"HTTP/1.1 ") <= 100
        assert server.closed(Closed.TOO_MANY_REQUESTS) == 1
        await server.answers()


async def test_a_hundred_unanswered_requests_are_answered_in_order_and_more_may_follow() -> None:
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        for _ in range(3):
            bodies = [b"x" * (i + 1) for i in range(99)]
            writer.write(
                b"".join(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(b), b) for b in bodies)
            )
            for body in bodies:
                await reader.readuntil(b"\r\n\r\n%d" % len(body))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: a\r\nHOST: b\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n", 505),
        (b"GET / HTTP/0.9\r\nhost: a\r\n", 505),
        (b"GET / HTTP/1.0\r\n", 200),
    ],
)
async def test_a_request_has_one_host_and_a_version_that_is_spoken(head: bytes, status: int) -> None:
    async with served() as server:
        answer = await server.ask(head + b"connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        if status != 200:
            error_of(answer, status)


SMUGGLED: Final = b"GET /headers HTTP/1.1\r\nhost: x\r\nsmuggled: yes\r\n\r\n"


def posted(headers: bytes, body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n" + body


@pytest.mark.parametrize(
    "sent",
    [
        posted(b"content-length: 3\r\ntransfer-encoding: xchunked\r\n", b"abc"),
        posted(b"transfer-encoding: xchunked\r\n", b"0\r\n\r\n"),
        posted(b"transfer-encoding: identity\r\n", b"0\r\n\r\n"),
        posted(b"content-length: 3\r\ntransfer-encoding: identity\r\n", b"abc"),
        posted(b"transfer-encoding: chunked, identity\r\n", b"0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", b"0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
        posted(b"content-length: 3\r\ntransfer-encoding:\x0bchunked\r\n", b"abc"),
        posted(b"content-length: 3\r\ntransfer-encoding : chunked\r\n", b"abc"),
        posted(b"transfer-encoding:\r\n chunked\r\n", b"0\r\n\r\n"),
        posted(b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", b"0\r\n\r\n"),
        posted(b"content-length: 5, 5\r\n", b"abcde"),
        posted(b"content-length: 5\r\ncontent-length: 5\r\n", b"abcde"),
        posted(b"content-length: +5\r\n", b"abcde"),
        posted(b"content-length: 0x5\r\n", b"abcde"),
        posted(b"content-length: 5_0\r\n", b"abcde"),
        posted(b"content-length: 1 2\r\n", b"abcde"),
        posted(b"content-length: 99999999999999999999999\r\n", b"abcde"),
        posted(b"content-length: 3\r\nx: y\rtransfer-encoding: chunked\r\n", b"abc"),
        posted(b"content-length: 3\r\n\r", b"abc"),
        posted(b"content-length: 3\r\n", b"abc").replace(b"\r\n", b"\n"),
        posted(b"x: y\ncontent-length: 0\r\n", b""),
        posted(b"transfer-encoding: chunked\r\n", b"5\nabcde\n0\n\n"),
        posted(b"transfer-encoding: chunked\r\n", b"0x5\r\nabcde\r\n0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\n", b"5 \r\nabcde\r\n0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\n", b"5;a\nb\r\nabcde\r\n0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\n", b"10000000000000005\r\nabcde\r\n0\r\n\r\n"),
        posted(b"transfer-encoding: chunked\r\n", b"5\r\nabcdeXX\r\n0\r\n\r\n"),
    ],
    ids=repr,
)
async def test_the_request_behind_one_whose_length_is_in_doubt_is_not_served(sent: bytes) -> None:
    """A proxy may read another length, so the second request may be a part of the first."""
    async with served() as server:
        answer = await server.ask(sent + SMUGGLED)
        assert b"smuggled" not in answer
        error_of(answer, 400)
        await server.answers()


@pytest.mark.parametrize("protocol", [b"h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA", b"websocket"])
async def test_an_upgrade_without_a_body_is_ignored(protocol: bytes) -> None:
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: %b\r\n\r\n" % protocol))
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        writer.write(GET)
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("how", [b"content-length: %d" % len(SMUGGLED), b"transfer-encoding: chunked"])
async def test_the_body_of_an_upgrade_is_not_served_as_a_request(how: bytes) -> None:
    """The parser skipped the body of such a request, and then read it as the next one."""
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(posted(b"connection: upgrade\r\nupgrade: h2c\r\n%b\r\n" % how, b""))
        await asyncio.sleep(0.05)
        writer.write(SMUGGLED)
        answer = await reader.read()
        assert b"smuggled" not in answer
        assert "Upgrade" in error_of(answer, 400)["message"]
        assert server.closed(Closed.UPGRADE) == 1
        await server.answers()
