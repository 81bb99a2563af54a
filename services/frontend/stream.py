"""The answer on its way out: JSON with a status as long as no token has left, server-sent events from then on."""

import asyncio
from typing import Final

from starlette.types import Send

from components.openai.errors import ApiError
from components.openai.events import DONE

FAREWELL_S: Final = 5.0  # for the last words to a client that may not be reading

Headers = list[tuple[bytes, bytes]]


class Reply:
    """One HTTP response, begun late and ended once."""

    __slots__ = ("_request_id", "_send", "answered", "status", "streaming")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self.status = 0  # as the client saw it, once it has
        self.streaming = False  # the events have begun: the status is out
        self.answered = False  # the last byte is out

    async def json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        """Answer in one piece."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *(headers or [])])
        await self._body(body, more=False)

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
        await self._body(data + DONE if last else data, more=not last)

    async def fail(self, error: ApiError, headers: Headers | None = None) -> None:
        """Tell the client of `error`, in whichever form is still open."""
        if self.answered:
            return
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._fail(error, headers or [])
        except TimeoutError:
            self.answered = True
        self.status = error.status  # for our own count; of a stream the client has read 200

    async def _fail(self, error: ApiError, headers: Headers) -> None:
        if self.streaming:
            await self.events(b"data: " + error.body() + b"\n\n", last=True)
        elif not self.status:
            extra = [(name.encode(), value.encode()) for name, value in error.headers().items()]
            await self.json(error.body(), error.status, [*extra, *headers])
        else:  # of an answer in one piece the headers are out: that it breaks off is all that can be told
            self.answered = True

    async def _start(self, status: int, headers: Headers) -> None:
        headers.append((b"x-request-id", self._request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.answered = not more
