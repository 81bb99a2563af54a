"""A NATS connection that breaks in unusual ways comes back, or ends its process."""

import asyncio
import logging
import re
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop
from nats.aio.msg import Msg
from nats.errors import FlushTimeoutError
from nats.micro.service import Service

from components.errors import BackendUnavailable, DeadlineExceeded, NobodyListens
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint, serve_calls
from components.messaging.connection import connect_bus
from components.messaging.secure_client import SecureClient
from components.wire.codec import pack
from components.wire.prefill import KvComing, RoomOk
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

INFO = b'INFO {"server_id":"x","version":"2.10.0","proto":1,"headers":true,"max_payload":8388608}\r\n'


class FakeNats:
    """The part of a server that a client needs to connect."""

    def __init__(self) -> None:
        self.resets_next = False  # the next connection is reset after INFO
        self.processed = b""  # all bytes before the last answered PING
        self.silent = False
        self.connections = 0
        self.refuses_calls = False  # like a server without listeners
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield
            self.reset_all()

    def reset_all(self) -> None:
        for writer in self._writers:
            _reset(writer)

    def deliver(self, subject: str, reply: str, data: bytes) -> None:
        """Send a message to its subscribers."""
        for writer in self._writers:
            sid = re.findall(rf"SUB {subject} +(\d+)\r".encode(), self.processed)[-1]
            writer.write(b"MSG %s %s %s %d\r\n%s\r\n" % (subject.encode(), sid, reply.encode(), len(data), data))

    def refuse_all(self) -> None:
        """Refuse all users, like a server after a change of its users."""
        for writer in self._writers:
            writer.write(b"-ERR 'Authorization Violation'\r\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            if not self.silent:
                writer.write(INFO)
            if self.resets_next:
                self.resets_next = False
                await asyncio.sleep(0.0005)
                _reset(writer)
                return
            received = b""
            while data := await reader.read(65536):
                received += data
                self.processed = received[: received.rfind(b"PING\r\n")]
                if self.refuses_calls:
                    writer.writelines(_refusals(received, data))
                if not self.silent:
                    writer.write(b"PONG\r\n" * data.count(b"PING\r\n"))
        except OSError:
            pass  # reset
        finally:
            self._writers.discard(writer)
            writer.close()


def _refusals(received: bytes, data: bytes) -> list[bytes]:
    """Return NATS's answers to the calls in `data`, for the first subscription with a wildcard."""
    sid = re.findall(rb"SUB \S+\.[*>] +(\d+)\r", received)[:1]
    replies = re.findall(rb"PUB \S+ (_INBOX\S+) [\d ]+\r", data)
    return [b"HMSG %s %s 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % (reply, *sid) for reply in replies]


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_a_bus_comes_back_when_its_server_resets_it_while_it_reconnects(caplog: pytest.LogCaptureFixture) -> None:
    """uvloop raised RuntimeError from a write, which ended nats-py's task: the client never reconnected."""
    caplog.set_level(logging.CRITICAL)

    async def run() -> None:
        nats = FakeNats()
        async with nats.running(), connect_bus(nats.url, "test") as bus:
            nats.resets_next = True
            nats.reset_all()
            await until(lambda: nats.connections >= 3 and bus.client.is_connected)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_connection_that_nats_ends_for_good_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """nats-py closes itself after an authorisation error: the process stayed registered, but received nothing."""
    caplog.set_level(logging.CRITICAL)

    async def process(nats: FakeNats) -> None:
        async with asyncio.timeout(PATIENCE_S), connect_bus(nats.url, "test"):
            nats.refuse_all()
            await asyncio.Event().wait()

    async def run() -> None:
        nats = FakeNats()
        async with nats.running():
            with pytest.raises(BackendUnavailable):
                await process(nats)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def _ignore(_: Msg) -> None:
    """No message arrives."""


async def test_a_subscription_is_active_when_it_returns() -> None:
    """nats-py's flush overtook the subscription, so an immediate call had no receiver."""
    nats = FakeNats()
    async with nats.running(), connect_bus(nats.url, "test") as bus, bus.subscription("calls", _ignore):
        assert b"SUB calls" in nats.processed


async def test_a_subscription_that_waits_for_a_silent_server_is_there_after_the_reconnect() -> None:
    """nats-py forgot its ping: a process that was starting ended with FlushTimeoutError."""
    nats = FakeNats()

    async def subscribe(bus: Bus) -> None:
        async with bus.subscription("calls", _ignore):
            assert b"SUB calls" in nats.processed

    async with nats.running(), connect_bus(nats.url, "test") as bus:
        nats.silent = True
        subscribing = asyncio.create_task(subscribe(bus))
        await asyncio.sleep(0.1)
        nats.silent = False
        nats.reset_all()
        await asyncio.wait_for(subscribing, PATIENCE_S)  # its flush would fail after 10 s


async def test_the_subject_of_a_call_has_no_queue_group() -> None:
    """A frozen server's stale member of the group got half of the calls: an answer took six seconds instead of two."""

    async def answer(request: KvComing) -> RoomOk:
        return RoomOk(room=request.room)

    nats = FakeNats()
    endpoint = Endpoint("close", KvComing, answer)
    async with nats.running(), connect_bus(nats.url, "test") as bus, serve_calls(bus, "test", "calls", [endpoint], {}):
        [line] = [line for line in nats.processed.split(b"\r\n") if line.startswith(b"SUB calls.close ")]
        assert len(line.split()) == 3  # SUB, the subject, an id


async def test_a_task_that_is_cancelled_just_before_it_subscribes_ends() -> None:
    """A Ctrl-C as `inspect events` subscribed was lost."""
    nats = FakeNats()
    async with nats.running(), connect_bus(nats.url, "test") as bus:

        async def subscribe() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            async with bus.subscription("calls", _ignore):
                await asyncio.sleep(0)
                raise AssertionError("the cancellation is lost")

        task = asyncio.create_task(subscribe())
        await asyncio.wait((task,))
        assert task.cancelled(), task.exception()


@pytest.mark.parametrize("turns", range(12))
async def test_a_task_that_is_cancelled_while_it_subscribes_ends(turns: int) -> None:
    """nats-py lost a cancellation that came together with NATS's answer, and the process could not end."""
    nats = FakeNats()
    async with nats.running(), connect_bus(nats.url, "test") as bus:

        async def subscribe() -> None:
            async with bus.subscription("calls", _ignore):
                await asyncio.Event().wait()

        task = asyncio.create_task(subscribe())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.cancelled()

        received = asyncio.Event()

        async def receive(_: Msg) -> None:
            received.set()

        async with asyncio.timeout(PATIENCE_S), bus.subscription("news", receive):
            nats.deliver("news", "", b"")
            await received.wait()  # the connection is still read


@pytest.mark.parametrize("call", ["connect", "flush"])
async def test_a_task_that_is_cancelled_while_it_connects_or_closes_ends(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's wait_for lost a Ctrl-C that came as NATS answered: only SIGKILL ended `make up`."""
    calls: list[SecureClient] = []
    forgetful = asyncio.Event()
    real = getattr(SecureClient, call)

    async def forgets(client: SecureClient, *arguments: object, **options: object) -> None:
        if forgetful.is_set():
            calls.append(client)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await real(client, *arguments, **options)

    monkeypatch.setattr(SecureClient, call, forgets)
    if call == "connect":
        forgetful.set()
    nats = FakeNats()
    async with nats.running():

        async def work() -> None:
            async with connect_bus(nats.url, "test"):
                forgetful.set()

        task = asyncio.create_task(work())
        await until(lambda: bool(calls))
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.cancelled()
        assert calls[0].is_closed


@pytest.mark.parametrize("call", ["start", "stop"])
async def test_a_task_that_is_cancelled_while_it_begins_or_ends_to_serve_ends(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's wait_for lost a Ctrl-C here too, and `make up` waited forever."""
    called = asyncio.Event()
    real = getattr(Service, call)

    async def forgets(service: Service) -> None:
        called.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await real(service)

    monkeypatch.setattr(Service, call, forgets)
    nats = FakeNats()
    async with nats.running():

        async def work() -> None:
            async with connect_bus(nats.url, "test") as bus, serve_calls(bus, "local", "kvmesh.local.x", [], {}):
                pass

        task = asyncio.create_task(work())
        await until(called.is_set)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.cancelled()


async def test_the_error_of_each_attempt_to_connect_is_passed_on() -> None:
    failures: list[Exception] = []
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        connection = connect_bus(f"nats://127.0.0.1:{nobody_listens.getsockname()[1]}", "test", failed=failures.append)
        connecting = asyncio.create_task(connection.__aenter__())
        await until(lambda: len(failures) > 1)
        connecting.cancel()
        await asyncio.wait([connecting], timeout=PATIENCE_S)
    assert {type(failure) for failure in failures} == {ConnectionRefusedError}


async def test_a_server_that_freezes_is_left_for_another_one_within_two_seconds() -> None:
    """Other instances count this one as lost after two seconds, and move its streams."""
    for _ in range(3):  # a busy machine may pause in one; nats-py alone takes minutes
        if (took_s := await _until_a_frozen_server_is_left()) < 3.0:  # 1.6 s
            return
    raise AssertionError(f"it took {took_s:.1f} s")


async def _until_a_frozen_server_is_left() -> float:
    one, two = FakeNats(), FakeNats()
    async with one.running(), two.running(), connect_bus(f"{one.url},{two.url}", "test") as bus:
        frozen, other = (one, two) if bus.client.connected_url.netloc in one.url else (two, one)
        frozen.silent = True
        began = time.monotonic()
        await until(lambda: other.connections)
        took_s = time.monotonic() - began
        await until(lambda: bus.client.is_connected)
        assert bus.since_reconnect_s() < time.monotonic() - began, "the bus has seen its reconnect"
        return took_s


async def test_a_call_that_our_own_outage_delayed_is_not_blamed_on_the_other_instance() -> None:
    nats = FakeNats()

    async def call(bus: Bus, timeout_s: float) -> RoomOk:
        return await bus.call("nobody.answers", KvComing(room="r"), RoomOk, timeout_s=timeout_s)

    async with nats.running(), connect_bus(nats.url, "test") as bus:
        await asyncio.sleep(0.3)
        with pytest.raises(DeadlineExceeded):
            await call(bus, timeout_s=0.2)
        calling = asyncio.create_task(call(bus, timeout_s=1.5))
        await asyncio.sleep(0.1)
        nats.reset_all()
        with pytest.raises(BackendUnavailable):
            await calling


async def _until_disconnected(nats_server: FakeNats, bus: Bus) -> None:
    nats_server.reset_all()
    async with asyncio.timeout(PATIENCE_S):
        while bus.client.is_connected:
            await asyncio.sleep(0)  # until it is connected again


async def test_an_answer_that_comes_at_once_after_an_outage_is_not_of_a_steady_connection() -> None:
    """nats-py reports a reconnect only after answers to earlier messages, when others had no time to reconnect.

    A live instance whose record etcd had lost in the same outage counted as dead.
    """
    server = FakeNats()

    async def call(bus: Bus) -> float:
        with pytest.raises(NobodyListens):
            await bus.call("nobody.listens", KvComing(room="r"), RoomOk, timeout_s=PATIENCE_S)
        return bus.since_reconnect_s()

    async with server.running(), connect_bus(server.url, "test") as bus:
        server.refuses_calls = True
        assert await call(bus) > 1e9
        await _until_disconnected(server, bus)
        assert await call(bus) < PATIENCE_S


async def test_a_subscription_that_ends_in_an_outage_is_not_renewed_after_it() -> None:
    """Its messages were still handled, and twice after a new subscription to its subject."""
    server = FakeNats()
    async with server.running(), connect_bus(server.url, "test") as bus:
        async with bus.subscription("news", _ignore):
            await _until_disconnected(server, bus)
        await until(lambda: bus.client.is_connected)
        await bus.flush()
        assert b"SUB news" not in server.processed


async def test_a_subscription_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was repeated, and each message was handled twice."""
    server = FakeNats()

    async def fail() -> None:
        raise FlushTimeoutError

    async with server.running(), connect_bus(server.url, "test") as bus:
        before = set(bus.client._subs)
        monkeypatch.setattr(bus, "flush", fail)
        with pytest.raises(DeadlineExceeded):
            await bus.subscription("news", _ignore).__aenter__()
        assert set(bus.client._subs) == before


async def test_a_service_that_ends_in_an_outage_takes_no_calls_after_it() -> None:
    """A process that left during an outage of NATS was subscribed again, and received calls that it could not answer."""

    async def answer(request: KvComing) -> RoomOk:
        return RoomOk(room=request.room)

    server, endpoint = FakeNats(), Endpoint("close", KvComing, answer)
    async with server.running(), connect_bus(server.url, "test") as bus:
        async with serve_calls(bus, "test", "calls", [endpoint], {}):
            await _until_disconnected(server, bus)
        await until(lambda: bus.client.is_connected)
        await bus.flush()
        assert b"SUB calls.close" not in server.processed


async def test_a_call_that_nats_has_delivered_to_a_leaving_instance_is_answered() -> None:
    """Its caller repeated it twice, for two seconds, before it tried another instance."""

    async def answer(request: KvComing) -> RoomOk:
        return RoomOk(room=request.room)

    server, endpoint = FakeNats(), Endpoint("close", KvComing, answer, runs_inline=True)
    async with server.running(), connect_bus(server.url, "test") as bus:
        async with serve_calls(bus, "test", "calls", [endpoint], {}):
            server.deliver("calls.close", "reply", pack(KvComing(room="r")))
        await bus.flush()
        assert server.processed.count(b"PUB reply ") == 1
