"""Clients that are slow, silent or hostile, on real sockets; another request is served meanwhile."""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any, Final

import pytest

from components.http.limits import ClientLimits, Closed
from tests.components.http.served import GET, LIMITS, error_of, served
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    "sent", [b"G", b"\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n", b"POST / HTTP/1.1\r\nx: y\r\nz"], ids=repr
)
async def test_a_head_that_does_not_end_is_408(sent: bytes) -> None:
    async with served() as server:
        assert error_of(await server.ask(sent), 408)["code"] == "request_timeout"
        assert server.closed(Closed.HEAD_LATE) == 1
        await server.answers()


async def test_a_head_byte_by_byte_is_408_however_long_it_goes_on() -> None:
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        answer = asyncio.create_task(reader.read())
        writer.write(b"GET /")
        while not answer.done():
            writer.write(b"a")
            await asyncio.sleep(0.02)
        error_of(answer.result(), 408)


@pytest.mark.parametrize("how", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_a_body_that_does_not_come_is_408_and_the_request_is_over(how: bytes) -> None:
    async with served() as server:
        assert "body" in error_of(await server.ask(b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % how), 408)["message"]
        assert server.closed(Closed.BODY_LATE) == 1
        await asyncio.wait_for(server.app.left.wait(), PATIENCE_S)


async def test_a_body_that_comes_at_the_least_rate_is_read_to_its_end() -> None:
    limits = replace(LIMITS, bytes_per_s=250)
    async with served(limits) as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n")
        # 100 bytes each 40 ms: ten times the least rate, because sleeps may be long; the whole body takes four times body_s
        for _ in range(20):
            writer.write(b"b" * 100)
            await asyncio.sleep(0.04)
        assert (await reader.readuntil(b"\r\n\r\n2000")).startswith(b"HTTP/1.1 200")


async def test_time_in_which_the_server_itself_was_held_up_is_not_the_clients() -> None:
    """After a pause of the process, all clients whose bytes had arrived meanwhile were closed."""
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200\r\n\r\n")
        for _ in range(2):
            await asyncio.sleep(0.06)
            writer.write(b"b" * 100)
            time.sleep(0.5)  # longer than body_s
        assert (await reader.readuntil(b"\r\n\r\n200")).startswith(b"HTTP/1.1 200")


async def test_a_body_that_dribbles_on_after_its_answer_is_cut_off() -> None:
    async with served() as server:
        answer = await server.ask(b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc")
        assert answer.endswith(b"\r\n\r\n0"), "nothing may follow the answer"
        assert server.closed(Closed.BODY_LATE) == 1


async def test_a_silent_connection_is_closed() -> None:
    async with served() as server:
        assert await server.ask(b"") == b""
        assert server.closed(Closed.NOTHING_SENT) == 1


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nx: %b\r\n\r\n" % (b"y" * 5000),
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
        b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"y" * 5000),
        b"GET / HTTP/1.1\r\nhost: x\r\nx: %b" % (b"y" * 1_000_000),
        b"GET /%b" % (b"y" * 1_000_000),
    ],
    ids=["value", "count", "url", "endless value", "endless url"],
)
async def test_a_head_over_the_limit_is_431(request_: bytes) -> None:
    async with served() as server:
        assert error_of(await server.ask(request_), 431)["code"] == "request_too_large"
        assert server.closed(Closed.HEAD_TOO_LARGE) == 1
        await server.answers()


async def test_a_large_body_is_no_large_head() -> None:
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"b" * 100_000)
        assert (await reader.readuntil(b"\r\n\r\n100000")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # https to an http port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-request-id: a\rb: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\n x: folded\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",  # smuggling
        b"POST / HTTP/1.1\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"EAT / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:40]),
)
async def test_what_is_no_http_is_400(sent: bytes) -> None:
    async with served() as server:
        error_of(await server.ask(sent), 400)
        assert server.closed(Closed.MALFORMED) == 1
        await server.answers()


async def test_a_reader_that_stops_is_closed_within_its_time_and_what_waits_for_it_is_bounded() -> None:
    async with served() as server, server.client() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/endless ", 1))
        await reader.readexactly(100)
        await server.until_closed(Closed.UNREAD)
        await asyncio.wait_for(server.app.left.wait(), PATIENCE_S)
        assert server.app.written < 16 * 2**20, "the kernel's buffers on both sides, and 64 KB of ours"
        await server.answers()


async def test_a_reader_that_is_slow_but_reads_is_left_alone() -> None:
    limits = replace(LIMITS, unread_s=1.0)  # the kernel accepts more only at times
    async with served(limits) as server, server.client() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/endless ", 1))
        began, read = time.monotonic(), 0
        while time.monotonic() - began < 3.0:  # three times `unread_s`
            read += len(await reader.read(2**20))
            await asyncio.sleep(0.01)
        assert server.closed(Closed.UNREAD) == 0
        assert not server.app.left.is_set()
        assert read > 0


async def test_a_reader_of_a_few_bytes_now_and_then_is_closed_too() -> None:
    limits = replace(LIMITS, bytes_per_s=10_000_000)
    async with served(limits) as server, server.client() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/endless ", 1))
        with contextlib.suppress(OSError):
            while server.closed(Closed.UNREAD) == 0 and not reader.at_eof():
                await reader.read(20_000)
                await asyncio.sleep(0.02)
        await server.until_closed(Closed.UNREAD)


async def test_requests_one_behind_the_other_are_answered_in_order() -> None:
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(GET * 50 + b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
        answers = await reader.readuntil(b"\r\n\r\n3")
        assert answers.count(b"HTTP/1.1 200") == 51


async def test_of_too_many_connections_the_longest_idle_are_closed_and_a_request_is_served() -> None:
    limits = ClientLimits(first_s=1000.0, check_every_s=0.02, connections=20)
    async with served(limits) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
        await server.answers()
        assert server.closed(Closed.TOO_MANY) >= 80
        for _, writer in idle:
            writer.close()


async def test_when_all_connections_are_at_work_one_more_is_503() -> None:
    limits = ClientLimits(body_s=1000.0, check_every_s=0.02, connections=3)
    async with served(limits) as server:
        working = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for _, writer in working:
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
        await until(lambda: server.app.begun == 3)
        assert error_of(await server.ask(GET), 503)["code"] == "overloaded"
        for reader, writer in working:
            writer.write(b"abc")
            assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200")
            writer.close()


PUSHED: Final = b"GET /pushed HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("end", ["garbage", "close", "half a body"])
async def test_a_client_whose_answer_breaks_off_holds_up_no_other(end: str) -> None:
    """Its bytes leave together with those of others, and another request may wait behind it."""
    late = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx" if end == "half a body" else b""
    async with served() as server, server.client() as (_, bad), server.client() as (good_reader, good):
        async with asyncio.timeout(PATIENCE_S):
            for number, (client, more) in enumerate([(bad, late), (good, b"")], 1):
                client.write(PUSHED + more)
                await until(lambda number=number: len(server.app.pushes) == number)  # type: ignore[misc]
            if not late:
                bad.write(GET + (b"\0\0\r\n\r\n" if end == "garbage" else b""))
            if end == "close":
                bad.transport.abort()
            ticks = 0
            while not server.app.left.is_set() or ticks < 5:
                with server.writes:
                    for push in server.app.pushes:
                        if push.is_open:
                            push.send(b"tick")
                ticks += 1
                await asyncio.sleep(0.01)
            assert not server.app.pushes[0].is_open
            got = b""
            while got.count(b"4\r\ntick\r\n") < ticks:
                got += await good_reader.read(1000)


EARLY: Final = b"POST /refused HTTP/1.1\r\nhost: x\r\n%bcontent-length: 3\r\n\r\n"


async def test_a_connection_whose_answer_came_before_the_end_of_the_body_is_closed_when_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of the body ended the idle timer: a client without a key could keep a connection forever."""
    monkeypatch.setattr("components.http.server.KEEP_ALIVE_S", 0.1)
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(EARLY % b"")
        await reader.readuntil(b"\r\n\r\n0")
        writer.write(b"abc")
        assert await reader.read() == b""


async def test_a_request_behind_such_a_body_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.http.server.KEEP_ALIVE_S", 0.5)
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(EARLY % b"")
        await reader.readuntil(b"\r\n\r\n0")
        writer.write(b"abc" + GET.replace(b"/", b"/pushed", 1))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.7)
        server.app.pushes[0].send(b"late")
        assert await reader.readuntil(b"late")


async def test_a_client_that_waits_for_100_and_gets_an_answer_learns_that_the_connection_ends() -> None:
    """Its next request was read as the body that it had never sent."""
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(EARLY % b"expect: 100-continue\r\n")
        assert b"\r\nconnection: close\r\n" in await reader.readuntil(b"\r\n\r\n0")
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(EARLY % b"expect: 100-continue\r\n" + b"abc")
        assert b"\r\nconnection: close\r\n" not in await reader.readuntil(b"\r\n\r\n0")
        writer.write(GET.replace(b"host", b"expect: 100-continue\r\ncontent-length: 3\r\nhost"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert b"\r\nconnection: close\r\n" not in await reader.readuntil(b"\r\n\r\n3")


async def test_a_client_of_http_1_0_gets_neither_chunks_nor_100() -> None:
    """RFC 9112, 6.1, and RFC 9110, 10.1.1. Such a client read chunk sizes as text, and 100 as its answer."""
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"GET /pushed HTTP/1.0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in head
        assert b"chunked" not in head
        assert not server.app.pushes[0].is_open, "pushed parts are chunks"
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"GET /endless HTTP/1.0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(50_000) == b"x" * 50_000
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        writer.write(b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        await asyncio.sleep(0.02)
        writer.write(b"abc")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("cut", [None, 1])
async def test_requests_behind_one_that_asks_for_an_upgrade_are_answered(cut: int | None) -> None:
    """They were dropped if they came in the same packet: the parser stops at an upgrade."""
    upgrade = GET.replace(b"host", b"connection: upgrade\r\nupgrade: websocket\r\nhost")
    sent = upgrade + GET + upgrade + GET
    async with served() as server, asyncio.timeout(PATIENCE_S), server.client() as (reader, writer):
        for start in range(0, len(sent), cut or len(sent)):
            writer.write(sent[start : start + (cut or len(sent))])
            if cut is not None:
                await asyncio.sleep(0)
        for _ in range(4):
            assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
