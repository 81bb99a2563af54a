"""`python -m tests.components.http.echo_server <port>`: serve this process's id over HTTP on a shared port, until SIGTERM."""

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import Any

import uvloop

from components.http.server import serve_http
from components.process import stop_signal


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    drain_timeout_s: float = 60.0


async def app(scope: Any, _: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(2.0)
    body = str(os.getpid()).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def main(host: str, port: int) -> None:
    async with serve_http(app, Address(host, port), share_port=True):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stop_signal()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
