"""TLS certificates, read again when their files change, and handshakes that count as connections.

`create_server(ssl=…)` reports a connection only after its handshake: silent clients could take all file descriptors.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from components.followed_files import FollowedFiles
from components.http.limits import ClientLimits, CloseCounter, Closed, OpenConnections
from components.startup import WrongSettings

if TYPE_CHECKING:  # services.local checks certificates without loading uvicorn
    from components.http.connection import Connection

RETRY_ACCEPT_S: Final = 0.1  # after a failure of `accept`, by the limit on open files


class Tls(NamedTuple):
    certificate: str  # with its chain
    key: str
    options: tuple[str, str] = ("--tls-cert", "--tls-key")  # for errors

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> "Tls | None":
        """Return None if the settings `tls_cert` and `tls_key` are not set. Raises: ValueError, if only one of them is."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise ValueError("tls_cert and tls_key belong together: set both")
        return cls(str(certificate), str(key))


def followed_context(tls: Tls) -> FollowedFiles[ssl.SSLContext]:
    """Raises: WrongSettings, if the files cannot be used now."""
    followed = FollowedFiles([Path(tls.certificate), Path(tls.key)], lambda: tls_context(tls))
    followed.current()
    return followed


def tls_context(tls: Tls) -> ssl.SSLContext:
    for option, path in zip(tls.options, (tls.certificate, tls.key), strict=True):
        try:
            with open(path, "rb"):  # noqa: PTH123 - only to see whether it can be read
                pass
        except OSError as exc:
            raise WrongSettings(f"{option} {path}: {exc.strerror}") from exc
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ValueError) as exc:  # OpenSSL reports swapped files only as "[SSL] PEM lib"
        raise WrongSettings(
            f"cannot serve TLS with {tls.certificate} and {tls.key}: {tls.options[0]} must be a PEM certificate, "
            f"{tls.options[1]} its private key without a password ({_swapped(tls) or exc})"
        ) from exc
    return context


def _swapped(tls: Tls) -> str:
    with open(tls.certificate, "rb") as certificate, open(tls.key, "rb") as key:  # noqa: PTH123
        if b"PRIVATE KEY" in certificate.read() and b"CERTIFICATE" in key.read():
            return "the two files look swapped"
    return ""


class TlsListener:
    def __init__(
        self,
        contexts: FollowedFiles[ssl.SSLContext],
        limits: ClientLimits,
        connections: OpenConnections,
        closed: CloseCounter,
    ) -> None:
        self._contexts = contexts
        self._limits = limits
        self._connections = connections
        self._closed = closed
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        self._accepting = asyncio.create_task(self._accept(listener, make), name="tls-accept")

    async def stop(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))

    async def close(self) -> None:
        for task in self._handshakes:
            task.cancel()
        if self._handshakes:
            await asyncio.wait(set(self._handshakes))

    async def _accept(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError:
                await asyncio.sleep(RETRY_ACCEPT_S)
                continue
            connection = make()
            task = asyncio.create_task(self._shake_hands(client, connection), name="tls-handshake")
            self._handshakes.add(task)
            task.add_done_callback(partial(self._handshake_over, client, connection))
            self._connections.add_handshake(connection, task.cancel)

    async def _shake_hands(self, client: socket.socket, connection: "Connection") -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._contexts.current(),
                ssl_handshake_timeout=self._limits.handshake_s,
            )
        except ConnectionAbortedError:
            self._closed.count(Closed.HANDSHAKE_LATE)
        except OSError:  # no TLS, or another version; ssl's errors are OSErrors
            pass

    def _handshake_over(self, client: socket.socket, connection: "Connection", task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._connections.remove_handshake(connection)
        if connection.transport is None:  # the handshake failed or never began
            client.close()
