"""One HTTP response: JSON with a status, or server-sent events once the first event has been sent."""

import asyncio
from contextlib import closing
from typing import Final

from starlette.types import Send

from components.errors import Cancelled
from components.http.connection import BodyPush
from components.openai.parts import AT_ONCE_BYTES, Parts, some_of

LAST_WRITE_TIMEOUT_S: Final = 5.0  # timeout for the last bytes to a client that may not be reading
MAX_HELD_BYTES: Final = 16 << 20  # events for one client that does not read

Headers = list[tuple[bytes, bytes]]


class Reply:
    """One HTTP response. Events are sent at once, but are held until the head is sent, and for a slow client."""

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

    def __init__(self, send: Send, headers: Headers, push: BodyPush | None) -> None:
        """`push`: sends a part of the body without waiting; None if the server has no such call."""
        self._send = send
        self._headers = headers
        self._push = push
        self._flows = False  # the head was sent and no event is held: events may be sent at once
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._end = b""  # the events that end the answer
        self.status = 0  # 0 before the head; after it, a failure's status, for our metrics only
        self.streaming = False  # the head of an event stream was sent, so the status is fixed
        self.answered = False  # the last byte was sent

    async def json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *(headers or [])])
        await self._body(body, more=False)

    async def parts(self, parts: Parts) -> None:
        """Send a long answer, which is written while the client reads it, so that other requests run in between."""
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
        """Send events now, or hold them and return False: the caller must `flush`. Raises: Cancelled, if too much is held."""
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

    def hold_final_events(self, events: bytes) -> None:
        """Hold the events that end the answer until the last `flush`; a failure replaces them."""
        self._end += events

    async def flush(self, *, last: bool = False) -> None:
        """Send the head, unless it was sent, and all held events. Waits for a slow client. `last` ends the response."""
        if not self.streaming:
            await self._start(
                200,
                [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the events
                ],
            )
            # only now, because the server may wait for the client before it writes
            self.streaming = True
        count = len(self._held)
        events = b"".join(self._held)
        self._held_bytes -= len(events)  # the limit covers only events that arrive while the client reads these
        await self._body(events + self._end if last else events, more=not last)
        del self._held[:count]
        self._flows = not (self._held or last)

    async def fail(self, status: int, body: bytes, headers: Headers, events: bytes) -> None:
        """Send a failure: as JSON, or as `events` after the held ones of a stream, unless too many are held."""
        if self.answered:  # at its beginning, in the background
            self.status = status
            return
        try:
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):
                if self.streaming:
                    if self._held_bytes > MAX_HELD_BYTES:
                        self._held.clear()
                    self._end = events
                    await self.flush(last=True)
                elif not self.status:
                    await self.json(body, status, headers)
                else:  # part of a JSON answer was sent: end it without the rest
                    self.answered = True
        except TimeoutError:
            self.answered = True
        self.status = status  # for our metrics; the client of a stream has already received 200

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})
        self.status = status

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.answered = not more
