"""A server that answers with a request's path, the size of its body and the names of its headers; it says its URL."""

import asyncio
import sys
from typing import Any

from components.http.limits import ClientLimits
from components.http.server import serve_http
from components.process import run
from tests.components.http.served import Address

LIMITS = ClientLimits(
    head_bytes=4096, head_s=0.5, body_s=0.5, bytes_per_s=1e6, first_s=5.0, check_every_s=0.02, requests=16
)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    names = b",".join(name for name, _ in scope["headers"])
    body = b"%b %d %b" % (scope["raw_path"], size, names)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def main() -> None:
    async with serve_http(answer, Address(), limits=LIMITS) as url:
        sys.stderr.write(f"url={url}\n")
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(main())
