"""nats-py's client, which here reads credential files for each connection, and never falls back to plain text.

It also parses a traced call's header in a third of the time.
"""

import asyncio
import ssl
import time
from typing import Any, Final

import nats.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.transport import TcpTransport

from components.credentials import NatsAccess
from components.startup import WrongSettings
from components.urls import Login, login_of, wants_tls

# NATS closes a connection with one of these when its user was changed, removed, or has expired.
_LOGIN_OVER: Final = ("authorization violation", "authentication expired", "authentication revoked")
_TRACED: Final = b"NATS/1.0\r\ntraceparent: "  # then the value, and two ends of lines
ANYONE: Final = NatsAccess()


class TlsRefused(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types
    """The server offers no TLS. Nothing was sent to it."""


class _Transport(TcpTransport):  # type: ignore[misc]
    async def connect_tls(self, *arguments: Any) -> None:
        await super().connect_tls(*arguments)
        assert self._io_writer is not None
        self._io_writer._protocol._over_ssl = True  # else asyncio warns at each end of a connection


class SecureClient(Client):  # type: ignore[misc]
    def __init__(self, url: str, access: NatsAccess) -> None:
        """Raises: WrongSettings."""
        super().__init__()
        self._transport: TcpTransport | None  # falsy before its first connection
        self._unanswered: list[asyncio.Future[bool]] = []  # pings of earlier connections
        self._access = access
        self._in_url = login_of(url)
        try:
            self._wants_tls = wants_tls(url, "nats", "tls", "MESH_NATS_URL")
        except ValueError as exc:
            raise WrongSettings(f"NATS servers {exc}") from exc
        access.check()
        if self._wants_tls:
            access.certificates.current()

    def login_options(self) -> dict[str, Any]:
        """Arguments for `connect`, with the URL's login apart: nats-py drops it for discovered servers."""
        inbox = {"inbox_prefix": self._access.inbox}
        given = self._in_url
        if given.password is not None:
            return {**inbox, "user": given.user, "password": given.password}
        if given.user is not None:
            return {**inbox, "token": given.user}
        if (login := self._access.login) is not None:
            return {**inbox, "user": lambda: login.current().user, "password": lambda: login.current().password}
        if (credentials := self._access.credentials) is not None:
            return {
                **inbox,
                "user_jwt_cb": lambda: credentials.current().jwt,
                "signature_cb": lambda nonce: credentials.current().key.sign(nonce),  # noqa: PLW0108 - read at each call
            }
        if (key := self._access.key) is not None:
            return {**inbox, "signature_cb": lambda nonce: key.current().sign(nonce)}
        return inbox

    async def _connect_to_server(self, s: Srv) -> None:
        """Connect as nats-py does, without web sockets."""
        s.last_attempt = time.monotonic()
        if not self._transport:
            self._transport = _Transport()
        await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return self._access.certificates.current().context

    def _connect_command(self) -> bytes:
        if self._access.key is not None and self._in_url == Login(None, None):
            self._public_nkey = self._access.key.current().public
        command: bytes = super()._connect_command()
        return command

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Raises: TlsRefused, where nats-py would continue in plain text and send the login."""
        if initial_connection and self._wants_tls and not info.get("tls_required"):
            raise TlsRefused("the server offers no TLS, but its address begins with tls://")
        await super()._process_info(info, initial_connection)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if not headers:
            return None
        if headers.startswith(_TRACED) and headers.find(b"\r", len(_TRACED)) == len(headers) - 4 and headers.isascii():
            return {"traceparent": headers[len(_TRACED) : -4].decode()}
        found: dict[str, str] | None = await super()._process_headers(headers)
        return found

    async def _process_connect_init(self) -> None:
        self._unanswered += self._pongs  # nats-py forgets them
        self._pongs: list[asyncio.Future[bool]] = []
        await super()._process_connect_init()

    async def ping_again(self) -> None:
        """Ping after a reconnect, for a waiting `flush`, which would else raise FlushTimeoutError after 10 s.

        The subscriptions are sent again first, so the answer still proves that NATS has them.
        """
        while self._unanswered:
            ping = self._unanswered.pop()
            if not ping.done():
                await self._send_ping(ping)

    async def _process_pong(self) -> None:
        """Accept the answer to a ping whose caller was cancelled or timed out: nats-py would stop reading."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect with the files' current content; nats-py would close the client for good."""
        if self._access.may_change and any(words in err_msg.lower() for words in _LOGIN_OVER):
            await self._error_cb(nats.errors.AuthorizationError())
            await self._process_op_err(nats.errors.AuthorizationError())
        else:
            await super()._process_err(err_msg)
