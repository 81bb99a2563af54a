"""TLS connections from the moment that they are accepted: until their handshake is over they are counted, and may be closed.

`create_server(ssl=…)` makes a connection known only after its handshake. Clients that say nothing would hold every file of
the process for a minute, and nothing would see them.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

from components.http_connection import Connection
from components.http_limits import Closed, Closures, Patience
from components.http_room import Room

NO_FILES_S: Final = 0.1  # until the next try to accept, when this process may open no more
Make = Callable[[], Connection]


class TlsListener:
    """Accepts TCP connections, and makes of each a `Connection` when its TLS handshake is over."""

    def __init__(self, context: ssl.SSLContext, patience: Patience, room: Room, closures: Closures) -> None:
        self._context = context
        self._patience = patience
        self._room = room
        self._closures = closures
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # one for each handshake

    def start(self, listener: socket.socket, make: Make) -> None:
        """Accept on `listener` until `stop`."""
        self._accepting = asyncio.create_task(self._accept(listener, make), name="tls-accept")

    async def stop(self) -> None:
        """Accept no more; handshakes go on."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))

    async def close(self) -> None:
        """Give up the handshakes that are under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _accept(self, listener: socket.socket, make: Make) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:  # the client has gone already
                continue
            except OSError:
                await asyncio.sleep(NO_FILES_S)
                continue
            connection = make()
            task = asyncio.create_task(self._shake_hands(client, connection), name="tls-handshake")
            self._tasks.add(task)
            task.add_done_callback(partial(self._over, client, connection))
            self._room.expect(connection, task.cancel)

    async def _shake_hands(self, client: socket.socket, connection: Connection) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, client, ssl=self._context, ssl_handshake_timeout=self._patience.handshake_s
            )
        except ConnectionAbortedError:
            self._closures.count(Closed.HANDSHAKE_LATE)
        except OSError:  # no TLS, or none that we speak; ssl's errors are some too
            pass

    def _over(self, client: socket.socket, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.forget(connection)
        if connection.transport is None:  # the handshake has failed, or was given up before it began
            client.close()
