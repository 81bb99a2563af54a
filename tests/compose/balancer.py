"""A balancer in front of frontends: it forwards TCP to addresses whose `/ready` returns 200."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self

import httpx

HERE: Final = "127.0.0.1"
PORT: Final = 8000
CONNECT_S: Final = 1.0
CHUNK_BYTES: Final = 1 << 16
CHECK_EVERY_S: Final = 1.0


class Balancer:
    """One thread for each direction of a connection, and one that checks addresses."""

    def __init__(self, found: Callable[[], Sequence[str]]) -> None:
        """`found` looks up the addresses of frontends, ready or not."""
        self.addresses: Sequence[str] = []  # ready ones
        self._found = found
        self._over = threading.Event()
        self._checks = threading.Thread(target=self._check, name="checks")
        self._turn = 0
        self._server = socket.create_server((HERE, 0), backlog=256)
        self.url = f"http://{HERE}:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        self.addresses = self._ready()
        self._checks.start()
        threading.Thread(target=self._accept, name="balancer", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._checks.join()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _check(self) -> None:
        while not self._over.wait(CHECK_EVERY_S):
            with suppress(AssertionError):  # a container left between two commands of the look-up
                self.addresses = self._ready()

    def _ready(self) -> Sequence[str]:
        """Return all addresses if none is ready: during an outage of NATS, frontends let requests wait."""
        found = self._found()
        return [address for address in found if _is_ready(address)] or found

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


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}:{PORT}/ready", timeout=CONNECT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
