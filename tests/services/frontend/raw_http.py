"""Requests on sockets of our own, so that we decide what they say and when they close."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit


async def send(url: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Any bytes."""
    server = urlsplit(url)
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    writer.write(request)
    await writer.drain()
    return reader, writer


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request with a body."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return await send(url, head.encode() + content)
