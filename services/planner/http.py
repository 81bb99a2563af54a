"""GET of a page on the mesh's own network, on the event loop: no proxy, no redirect, no connection kept."""

import asyncio
from typing import Final
from urllib.parse import urlsplit

from components.errors import PeerLost

LARGEST_BYTES: Final = 16 * 1024 * 1024
TIMEOUT_S: Final = 2.0


async def get(url: str) -> str:
    """The body of `http://…`. Raises: PeerLost, for whatever is no answer with status 200."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                # HTTP/1.0: the body ends with the connection, and is not chunked
                writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode("latin-1"))
                head, _, body = (await _read_all(reader, url)).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as exc:  # a host name that cannot be one is a ValueError
        raise PeerLost(f"{url} cannot be read: {str(exc) or type(exc).__name__}") from exc
    status = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
    if status != [b"200"]:
        raise PeerLost(f"{url} answers {b' '.join(status).decode(errors='replace') or 'nothing'}")
    return body.decode(errors="replace")


async def _read_all(reader: asyncio.StreamReader, url: str) -> bytes:
    data = bytearray()
    while part := await reader.read(2**16):
        data += part
        if len(data) > LARGEST_BYTES:
            raise PeerLost(f"{url} is longer than {LARGEST_BYTES} bytes")
    return bytes(data)
