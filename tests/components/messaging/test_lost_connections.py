"""A NATS connection that breaks in unusual ways comes back, or ends what stands on it: no process stays deaf and alive."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from components.errors import BackendUnavailable
from components.messaging.bus import Bus, connect_bus

INFO = b'INFO {"server_id":"x","version":"2.10.0","proto":1,"headers":true,"max_payload":8388608}\r\n'


class FakeNats:
    """As much of a server as a client needs to connect."""

    def __init__(self) -> None:
        self.resets_next = False  # the next connection is reset right behind INFO
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

    def refuse_all(self) -> None:
        """What a server says to users that it knows no longer."""
        for writer in self._writers:
            writer.write(b"-ERR 'Authorization Violation'\r\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            writer.write(INFO)
            if self.resets_next:
                self.resets_next = False
                await asyncio.sleep(0.0005)
                _reset(writer)
                return
            while data := await reader.read(65536):
                writer.write(b"PONG\r\n" * data.count(b"PING\r\n"))
        except OSError:
            pass  # reset
        finally:
            self._writers.discard(writer)
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _until_connected(bus: Bus) -> None:
    async with asyncio.timeout(10):
        while not bus.client.is_connected:
            await asyncio.sleep(0.05)


def test_a_bus_comes_back_when_its_server_resets_it_while_it_reconnects(caplog: pytest.LogCaptureFixture) -> None:
    """uvloop raised RuntimeError from a write, nats-py's task died of it, and nobody tried again: 20 of 20 times."""
    caplog.set_level(logging.CRITICAL)

    async def run() -> None:
        nats = FakeNats()
        async with nats.running(), connect_bus(nats.url, "test") as bus:
            nats.resets_next = True
            nats.reset_all()
            await asyncio.sleep(0.2)
            await _until_connected(bus)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_connection_that_nats_ends_for_good_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """nats-py closes itself after an authorisation error and never tries again: the process stayed, registered and deaf."""
    caplog.set_level(logging.CRITICAL)

    async def process(nats: FakeNats) -> None:
        async with asyncio.timeout(10), connect_bus(nats.url, "test"):
            nats.refuse_all()
            await asyncio.Event().wait()

    async def run() -> None:
        nats = FakeNats()
        async with nats.running():
            with pytest.raises(BackendUnavailable):
                await process(nats)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
