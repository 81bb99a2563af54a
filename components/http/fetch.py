"""Send one HTTP request over a new connection."""

import http.client
import ssl
from collections.abc import Mapping
from email.message import Message
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import urlsplit

MAX_BYTES: Final = 16 * 1024 * 1024
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes


def fetch(
    url: str,
    *,
    timeout_s: float,
    method: str = "GET",
    body: str | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Request `url`, not through a proxy. It blocks.

    Args:
        timeout_s: of each wait for the server.
        context: for `https://…`; None trusts the authorities of this machine.
    Raises: OSError, also for a malformed answer and for one of more than MAX_BYTES.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=timeout_s)
        )
        try:
            connection.request(method, parts._replace(scheme="", netloc="").geturl() or "/", body, dict(headers))
            answer = connection.getresponse()
            content = answer.read(MAX_BYTES + 1)
        finally:
            connection.close()
    except (http.client.HTTPException, ValueError) as exc:  # ValueError: of the URL
        raise ConnectionError(str(exc) or type(exc).__name__) from exc
    if len(content) > MAX_BYTES:
        raise ConnectionError(f"longer than {MAX_BYTES} bytes")
    if answer.length:  # bytes missing according to Content-Length
        raise ConnectionError(f"cut off {answer.length} bytes before its end")
    return Answer(answer.status, answer.headers, content)
