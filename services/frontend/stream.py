"""The answer on its way out: JSON with a status as long as no token has left, server-sent events from then on."""

import asyncio
from contextlib import closing
from typing import Final

from starlette.types import Send

from components.openai.parts import AT_ONCE_BYTES, Parts, some_of

FAREWELL_S: Final = 5.0  # for the last words to a client that may not be reading

Headers = list[tuple[bytes, bytes]]


class Reply:
    """One HTTP response, begun late and ended once."""

    __slots__ = ("_headers", "_send", "answered", "status", "streaming")

    def __init__(self, send: Send, headers: Headers) -> None:
        """`headers`: of the answer, whatever it is."""
        self._send = send
        self._headers = headers
        self.status = 0  # as the client saw it, once it has
        self.streaming = False  # the events have begun: the status is out
        self.answered = False  # the last byte is out

    async def json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        """Answer in one piece."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *(headers or [])])
        await self._body(body, more=False)

    async def parts(self, parts: Parts) -> None:
        """Answer with JSON. A long answer is made and sent part by part, as the client reads it: others have their turn."""
        with closing(parts):
            some = some_of(parts)
            if len(some) < AT_ONCE_BYTES:
                await self.json(some)
                return
            await self._start(200, [(b"content-type", b"application/json")])
            while some:
                await self._body(some, more=True)
                await asyncio.sleep(0)
                some = some_of(parts)
            await self._body(b"", more=False)

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """Send events; the first call sends the headers before them."""
        if not self.streaming:
            await self._start(
                200,
                [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
                ],
            )
            self.streaming = (
                True  # only now: the server makes us wait, before it writes, for a client that does not read
            )
        await self._body(data, more=not last)

    async def fail(self, status: int, body: bytes, headers: Headers, events: bytes) -> None:
        """Tell the client of a failure in the form still open: an answer of its own, or a stream's last events."""
        if self.answered:
            return
        try:
            async with asyncio.timeout(FAREWELL_S):
                if self.streaming:
                    await self.events(events, last=True)
                elif not self.status:
                    await self.json(body, status, headers)
                else:  # of an answer in one piece the headers are out: that it breaks off is all that can be told
                    self.answered = True
        except TimeoutError:
            self.answered = True
        self.status = status  # for our own count; of a stream the client has read 200

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})
        self.status = status

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.answered = not more
