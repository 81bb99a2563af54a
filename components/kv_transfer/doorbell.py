"""A TCP port where peers notify this process, for backends without notifications.

A false ring completes no transfer: decode requires the room's random stamp in the aux slot.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from components.aio import BackgroundTasks, ended, exception_of
from components.errors import MalformedMessage, TransferFailed
from components.wire.codec import pack, unpack
from components.wire.doorbell import Ring, RingAcknowledged

log = logging.getLogger(__name__)

MAX_FRAME_BYTES: Final = 4096
CONNECT_TIMEOUT_S: Final = 5.0


class DoorbellServer:
    def __init__(self, agent: str, host: str, write_aux: Callable[[int, bytes], None] | None) -> None:
        self.address = ""  # "<host>:<port>", once it listens
        self._agent = agent
        self._host = host
        self._write_aux = write_aux
        self._expected: dict[str, asyncio.Future[None]] = {}
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def expect(self, notification: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected[notification] = future
        future.add_done_callback(lambda _: self._expected.pop(notification, None))
        return future

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._answer, self._host, 0)
        self.address = f"{self._host}:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task, writer in list(self._connections.items()):
                writer.transport.abort()
                await ended(task)
            await server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._connections[me] = writer
        try:
            while True:
                self._ring(unpack(await _read_frame(reader), Ring))
                _write_frame(writer, pack(RingAcknowledged(agent=self._agent)))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client has gone
        except MalformedMessage as exc:
            log.warning("doorbell: client dropped", extra={"cause": exc.message})
        finally:
            self._connections.pop(me, None)
            await _close(writer)

    def _ring(self, ring: Ring) -> None:
        future = self._expected.get(ring.notification)
        if future is None or future.done():
            return  # the slot may be another transfer's by now
        if self._write_aux is not None and ring.aux:
            self._write_aux(ring.aux_slot, ring.aux)
        future.set_result(None)


class DoorbellClient:
    def __init__(self, agent: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._agent = agent
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self._asking = BackgroundTasks()

    @property
    def is_broken(self) -> bool:
        return self._writer.is_closing()

    async def ring(self, ring: Ring) -> None:
        """Notify the peer, and wait for its answer without a timeout.

        Raises: TransferFailed, also after `close`.
        """
        asking = self._asking.start(self._ask(ring))
        asking.add_done_callback(exception_of)  # or asyncio logs it if the caller has gone
        await asyncio.shield(asking)  # or a cancelled caller would leave its answer to the next one

    async def close(self) -> None:
        self._writer.transport.abort()  # a peer that reads nothing would block a close
        for asking in list(self._asking):
            await ended(asking)
        await _close(self._writer)

    async def _ask(self, ring: Ring) -> None:
        async with self._turn:
            try:
                _write_frame(self._writer, pack(ring))
                await self._writer.drain()
                answer = unpack(await _read_frame(self._reader), RingAcknowledged)
            except (asyncio.IncompleteReadError, OSError, MalformedMessage) as exc:
                self._writer.transport.abort()
                raise TransferFailed(f"{self._agent} does not answer: {exc or type(exc).__name__}") from exc
            if answer.agent != self._agent:
                self._writer.transport.abort()
                raise TransferFailed(f"{answer.agent!r} answers at the address of {self._agent!r}")


async def connect(address: str, agent: str) -> DoorbellClient:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            client = DoorbellClient(agent, *await asyncio.open_connection(host, int(port)))
            try:
                await client.ring(Ring())
            except BaseException:
                await client.close()
                raise
    except (OSError, ValueError, OverflowError) as exc:  # also a timeout or an invalid port
        raise TransferFailed(f"{agent} cannot be reached at {address!r}: {exc or type(exc).__name__}") from exc
    return client


def _write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise MalformedMessage(f"a frame of {size} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return await reader.readexactly(size)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class DoorbellClients:
    def __init__(self) -> None:
        self._clients: dict[str, DoorbellClient] = {}

    async def connect(self, agent: str, address: str) -> None:
        client = self._clients.get(agent)
        if client is not None and not client.is_broken:
            return
        opened = await connect(address, agent)
        client = self._clients.get(agent)
        if client is not None and not client.is_broken:  # another caller connected meanwhile
            await opened.close()
        else:
            self._clients[agent] = opened

    def to(self, agent: str) -> DoorbellClient:
        client = self._clients.get(agent)
        if client is None:
            raise TransferFailed(f"no connection to {agent}")
        return client

    async def disconnect(self, agent: str) -> None:
        client = self._clients.pop(agent, None)
        if client is not None:
            await client.close()

    async def disconnect_all(self) -> None:
        for agent in list(self._clients):
            await self.disconnect(agent)
