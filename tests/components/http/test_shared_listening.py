"""Processes that listen on one port: no request is lost when one of them stops."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress

import pytest
import uvloop

from components.http.listening import has_connections, refuse_connections
from components.http.server import serve_http
from components.startup import CannotServe
from tests.components.http.echo_server import Address, app
from tests.conftest import RunService, ServiceProcess
from tests.waiting import PATIENCE_S, until

Start = Callable[[], ServiceProcess]


@pytest.fixture
def host(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "127.0.0.1"))


@pytest.fixture
def port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(run_service: RunService, host: str, port: int) -> Start:
    def run() -> ServiceProcess:
        process = run_service("tests.components.http.echo_server", host, str(port))
        process.wait_for_log("ready")
        return process

    return run


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, path: str = "/") -> tuple[int, bool]:
        """Return the id of the process that answered, and whether the connection closes."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(await self._reader.readexactly(length)), b"connection: close" in head

    async def aclose(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


async def connect(host: str, port: int, stack: AsyncExitStack) -> Client:
    client = Client(*await asyncio.open_connection(host, port))
    stack.push_async_callback(client.aclose)
    return client


def test_under_load_no_client_notices_that_a_process_leaves(start: Start, host: str, port: int) -> None:
    answers: list[int] = []
    failed: list[str] = []

    async def asks(*, keep: bool, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                async with AsyncExitStack() as stack:
                    client, last = await connect(host, port, stack), False
                    while not (last or over.is_set()):
                        pid, last = await client.ask()
                        answers.append(pid)
                        await asyncio.sleep(0.001)
                        last = last or not keep
            except (OSError, asyncio.IncompleteReadError) as exc:
                failed.append(repr(exc))

    async def run() -> None:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for i in range(16):
                clients.create_task(asks(keep=i % 4 == 0, over=over))
            for leaving in processes[:-1]:
                answers.clear()
                await until(lambda p=leaving: answers.count(p.popen.pid) > 50)  # type: ignore[misc]
                assert await asyncio.to_thread(leaving.terminate) == 0, leaving.logged()
            over.set()

    processes = [start() for _ in range(3)]
    asyncio.run(run())
    assert not failed


@pytest.mark.parametrize(
    ("share", "host"), [(True, "127.0.0.1"), (False, "127.0.0.1"), (True, "::1")], indirect=["host"]
)
def test_connections_not_yet_accepted_are_served_before_the_port_is_left(share: bool, port: int, host: str) -> None:
    """The kernel resets them when their listener closes. They arrive during a stall of the event loop."""
    asked = threading.Event()

    def clients() -> list[bytes]:
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection((host, port))) for _ in range(16)]
            for connection in connections:
                connection.sendall(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
            asked.set()
            return [connection.recv(1000) for connection in connections]

    async def run() -> list[bytes]:
        async with serve_http(app, Address(host, port), share_port=share):
            await asyncio.sleep(0.05)  # the server's tick takes 0.05 s
            asking = asyncio.get_running_loop().run_in_executor(None, clients)
            asked.wait(PATIENCE_S)
        return await asking

    answers = uvloop.run(run())
    assert all(b"connection: close" in answer for answer in answers), answers


def test_a_listener_that_takes_no_more_keeps_the_connections_it_has(host: str, port: int) -> None:
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind((host, port))
        listener.listen()
        early = stack.enter_context(socket.create_connection((host, port)))
        refuse_connections(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection((host, port), timeout=0.3)
        accepted = stack.enter_context(listener.accept()[0])
        early.sendall(b"hello")
        assert accepted.recv(5) == b"hello"
        assert not has_connections(listener)


def test_a_connection_made_just_before_the_stop_may_still_bring_its_request(start: Start, host: str, port: int) -> None:
    process = start()

    async def run() -> None:
        async with AsyncExitStack() as stack:
            fresh, used = [await connect(host, port, stack) for _ in range(2)]
            await used.ask()
            process.popen.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)  # well below LAST_REQUESTS_S
            for client in (fresh, used):
                _, last = await client.ask()
                assert last

    asyncio.run(run())


def test_a_process_that_does_not_share_its_port_has_it_alone(start: Start, host: str, port: int) -> None:
    async def run(*, share: bool) -> None:
        async with serve_http(app, Address(host, port), share_port=share):
            pass

    process = start()
    with pytest.raises(CannotServe, match=f"cannot listen on {host}:{port}: Address already in use"):
        asyncio.run(run(share=False))
    asyncio.run(run(share=True))
    process.kill()

    async def alone() -> None:
        async with serve_http(app, Address(host, port)):
            await run(share=True)

    with pytest.raises(CannotServe, match=f"cannot listen on {host}:{port}: Address already in use"):
        asyncio.run(alone())


def test_who_is_killed_takes_only_its_own_connections(start: Start, host: str, port: int) -> None:
    processes = [start() for _ in range(2)]

    async def run() -> None:
        async with AsyncExitStack() as stack:
            owned: dict[int, list[Client]] = {}
            while len(owned) < 2 or min(map(len, owned.values())) < 4:
                client = await connect(host, port, stack)
                owned.setdefault((await client.ask())[0], []).append(client)
            killed, left = (process.popen.pid for process in processes)
            slow = [(pid, asyncio.create_task(c.ask("/slow"))) for pid, some in owned.items() for c in some[:4]]
            await asyncio.sleep(0.1)
            os.kill(killed, signal.SIGKILL)
            for pid, task in slow:
                if pid == killed:
                    with pytest.raises((OSError, asyncio.IncompleteReadError)):
                        await task
                else:
                    assert (await task)[0] == left
            for _ in range(20):
                assert (await (await connect(host, port, stack)).ask())[0] == left

    asyncio.run(run())
