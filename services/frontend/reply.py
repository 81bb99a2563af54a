"""One HTTP response: JSON with a status while no event has left, server-sent events after that."""

import asyncio
from contextlib import closing
from typing import Final

from starlette.types import Send

from components.errors import Cancelled
from components.http.connection import BodyPush
from components.openai.parts import AT_ONCE_BYTES, Parts, some_of

FAREWELL_S: Final = 5.0  # for the last bytes to a client that may not be reading
MAX_HELD_BYTES: Final = 16 << 20  # events for one client that does not read

Headers = list[tuple[bytes, bytes]]


class Reply:
    """One HTTP response. Its events leave at once, or are held before the head and for a slow client."""

    __slots__ = (
        "_end",
        "_flows",
        "_headers",
        "_held",
        "_held_bytes",
        "_push",
        "_send",
        "answered",
        "status",
        "streaming",
    )

    def __init__(self, send: Send, headers: Headers, push: BodyPush | None = None) -> None:
        """`push`: sends a part of the body without waiting, if the server can."""
        self._send = send
        self._headers = headers
        self._push = push
        self._flows = False  # the head is out and nothing is held: an event may leave at once
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._end = b""  # the events that end the answer
        self.status = 0  # 0 before the head; of an error after it, for our count alone
        self.streaming = False  # events have begun: the status is out
        self.answered = False  # the last byte is out

    async def json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *(headers or [])])
        await self._body(body, more=False)

    async def parts(self, parts: Parts) -> None:
        """A long answer is made as the client reads it, so that other requests run in between."""
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

    def write(self, events: bytes) -> bool:
        """Send events now, or hold them and return False: `flush` must follow. Raises: Cancelled, if too much is held."""
        if self._flows and self._push is not None and self._push.is_open:
            self._push.send(events)
            return True
        self.hold(events)
        return False

    def hold(self, events: bytes) -> None:
        self._flows = False  # later events must not overtake these
        self._held.append(events)
        self._held_bytes += len(events)
        offered = self.streaming or len(self._held) > 1  # a first event of any size has not been offered
        if offered and self._held_bytes > MAX_HELD_BYTES:
            raise Cancelled("the client reads too slowly")

    def hold_end(self, events: bytes) -> None:
        """Hold events that end the answer until the last `flush`; a failure takes their place."""
        self._end += events

    async def flush(self, *, last: bool = False) -> None:
        """Send the head if that is not out, and what is held. Waits for a slow client. `last` ends the response."""
        if not self.streaming:
            await self._start(
                200,
                [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
                ],
            )
            # only now: the server may wait for the client before it writes
            self.streaming = True
        count = len(self._held)
        events = b"".join(self._held)
        self._held_bytes -= len(events)  # only events that arrive while the client reads these count towards the bound
        await self._body(events + self._end if last else events, more=not last)
        del self._held[:count]
        self._flows = not (self._held or last)

    async def fail(self, status: int, body: bytes, headers: Headers, events: bytes) -> None:
        """Send a failure, or the last events of a stream after those that are held, unless these are too many."""
        if self.answered:  # at its beginning, in the background
            self.status = status
            return
        try:
            async with asyncio.timeout(FAREWELL_S):
                if self.streaming:
                    if self._held_bytes > MAX_HELD_BYTES:
                        self._held.clear()
                    self._end = events
                    await self.flush(last=True)
                elif not self.status:
                    await self.json(body, status, headers)
                else:  # half a JSON answer is out: it breaks off
                    self.answered = True
        except TimeoutError:
            self.answered = True
        self.status = status  # for our count; the client of a stream has read 200

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})
        self.status = status

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.answered = not more
