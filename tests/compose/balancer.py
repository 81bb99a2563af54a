"""A balancer in front of frontends, as users have one: it connects to the next address that accepts."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

HERE: Final = "127.0.0.1"
PORT: Final = 8000
CONNECT_S: Final = 1.0
CHUNK_BYTES: Final = 1 << 16


class Balancer:
    """TCP, one thread for each direction of a connection."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = []  # may be replaced at any time
        self._turn = 0
        self._server = socket.create_server((HERE, 0), backlog=256)
        self.url = f"http://{HERE}:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="balancer", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        with client:
            peer = self._connected()
            if peer is None:
                return
            with peer:
                threading.Thread(target=_copy, args=(client, peer), daemon=True).start()
                _copy(peer, client)

    def _connected(self) -> socket.socket | None:
        self._turn += 1
        turn, addresses = self._turn, list(self.addresses)
        for i in range(len(addresses)):
            with suppress(OSError):
                peer = socket.create_connection((addresses[(turn + i) % len(addresses)], PORT), CONNECT_S)
                peer.settimeout(None)
                return peer
        return None


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
