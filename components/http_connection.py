"""One HTTP connection: uvicorn's, with bounds on its head and on how long a client may keep it waiting.

uvicorn closes a connection that is idle after a request, and nothing else: a client that sends its headers or its body byte
by byte, or reads none of what it has asked for, would keep the connection and what belongs to it for as long as it likes.
Nothing here runs per token: the transport says when it has more than it can send, and a look once a second finds the late.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import StrEnum, auto
from typing import Any, Final
from uuid import uuid4

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from components.http_limits import REFUSALS, Closed, Closures, Patience
from components.http_room import Room
from components.http_writer import ConnectionWriter, HeldWrites

PUSH: Final = "kvmesh.push"  # of a scope: a BodyPush
LINGER_S: Final = 2.0  # for a client to read the last word: a socket closed under what it still sends would lose it
AT_A_TIME: Final = 512  # connections looked at before others get their turn


class Waits(StrEnum):
    """For what of its client's."""

    REQUEST = auto()
    HEAD = auto()
    BODY = auto()
    END = auto()  # nothing: our last answer is sent, and what arrives is dropped


class Connection(HttpToolsProtocol):
    """See the module. Whatever closes it says so first, where an answer is still possible."""

    def __init__(self, patience: Patience, room: Room, closures: Closures, writes: HeldWrites, **options: Any) -> None:
        """One of those in `room`, made by uvicorn with its `options`."""
        super().__init__(**options)
        self._writes = writes
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests that are not answered, in their order
        self._patience = patience
        self._room = room
        self._closures = closures
        self._waits = Waits.REQUEST
        self.since_s = 0.0  # it waits
        self._taken_bytes = 0  # of what it waits for
        self._body_bytes = 0  # among them
        self._bare_bytes = 0  # since the body grew last
        self._rest_bytes = 0  # of a body, since its request was answered
        self._moved = False  # what was read last brought a part of a body, or the end of what was waited for
        self._fault = Closed.MALFORMED  # what the parser stops for
        self._unread_since_s = 0.0  # so much of ours waits, while nothing is added
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        # in uvicorn's hands too: what waits in it is sent before a close
        self.transport = self._writer = ConnectionWriter(transport, self._writes, self._lingers)
        self.since_s = self._unread_since_s = self.loop.time()
        if not self._room.admit(self):
            self._refuse(Closed.TOO_MANY)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, or of several."""
        if self._waits is Waits.END:
            self._drop(len(data))
            return
        if self._waits is Waits.REQUEST:
            self._wait(Waits.HEAD)
        self._taken_bytes += len(data)
        self._moved = False
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._fault)
        except httptools.HttpParserUpgrade:
            return  # to nothing that we speak: the request is answered as it is
        if self._waits is Waits.HEAD and self._taken_bytes > self._patience.head_bytes:
            self._refuse(Closed.HEAD_TOO_LARGE)
        elif self._waits is Waits.BODY:
            self._bound_body(len(data))

    def on_message_begin(self) -> None:
        """A further request may follow in the same bytes."""
        if self._waits is Waits.REQUEST:
            self._wait(Waits.HEAD)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which follow the body, are none."""
        if self._waits is Waits.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request can be served; its body may follow."""
        fault = self._fault_of_head()
        if fault is not None:
            self._fault = fault
            raise httptools.HttpParserError(fault)
        super().on_headers_complete()
        self._writer.expect_head()
        self._cycles.append(self.cycle)
        self.scope[PUSH] = BodyPush(self.cycle)  # type: ignore[typeddict-unknown-key]  # a server may add its own
        self._wait(Waits.BODY)

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._moved = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come whole."""
        super().on_message_complete()
        self._wait(Waits.REQUEST)

    def on_response_complete(self) -> None:
        """An answer is out; the next request may have its turn."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        if self._waits is not Waits.END:
            super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._waits = Waits.END
        self._end_cycles()
        super().connection_lost(exc)

    def look(self, now_s: float) -> None:
        """Close the connection if its client is too late with anything."""
        patience, waited_s = self._patience, now_s - self.since_s
        if self._reads_too_little(now_s):
            self._closures.count(Closed.UNREAD)
            self.transport.abort()  # a close would wait for what is unsent to be sent
        elif self.transport.is_closing():
            return
        elif self._waits is Waits.END:
            if waited_s > LINGER_S:
                self.transport.close()
        elif self.flow.read_paused or (self._waits is Waits.HEAD and self._is_serving):
            self.since_s = now_s  # it is our turn
        elif self._waits is Waits.HEAD and waited_s > patience.head_s:
            self._refuse(Closed.HEAD_LATE)
        elif self._waits is Waits.BODY and waited_s > patience.body_s + self._taken_bytes / patience.bytes_per_s:
            self._refuse(Closed.BODY_LATE)
        elif self._waits is Waits.REQUEST and self.cycle is None and waited_s > patience.first_s:
            self._closures.count(Closed.NOTHING_SENT)
            self.transport.close()

    def _wait(self, what: Waits) -> None:
        self._waits = what
        self._moved = True
        self.since_s = self.loop.time()
        self._taken_bytes = self._body_bytes = self._bare_bytes = self._rest_bytes = 0

    def _fault_of_head(self) -> Closed | None:
        """Why the request whose head has come is refused."""
        version = self.parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            return Closed.HTTP_VERSION
        most = self._patience.head_bytes
        if self._taken_bytes > most and self._head_bytes() > most:
            return Closed.HEAD_TOO_LARGE
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            return Closed.HOST
        # httptools skips the body of such a request, and would then parse it as the next request
        if self.parser.should_upgrade() and any(_announces_body(name, value) for name, value in self.headers):
            return Closed.UPGRADE
        return Closed.TOO_MANY_REQUESTS if len(self._cycles) >= self._patience.requests else None

    def _bound_body(self, size: int) -> None:
        """Bound chunk sizes, extensions and trailers by the body that comes with them, after a read of `size` bytes.

        Reads that bring no part of a body have a bound of their own. All trailers are such reads, and httptools copies what
        it has of one trailer with each read.
        """
        patience = self._patience
        self._bare_bytes = 0 if self._moved else self._bare_bytes + size
        framing_bytes = self._taken_bytes - self._body_bytes
        if (
            self._bare_bytes > patience.head_bytes
            or framing_bytes > patience.head_bytes + patience.framing * self._body_bytes
        ):
            self._refuse(Closed.FRAMING_TOO_LARGE)
        elif self.cycle.response_complete:
            self._rest_bytes += size
            if self._rest_bytes > patience.rest_bytes:
                self._refuse(Closed.REST_TOO_LARGE)

    def _drop(self, size: int) -> None:
        """Drop `size` bytes that follow our last answer; after `rest_bytes` of them abort the connection."""
        self._rest_bytes += size
        if self._rest_bytes > self._patience.rest_bytes:
            self.transport.abort()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _end_cycles(self) -> None:
        """Nobody waits for their answers any more. uvicorn tells the last request alone, which may wait for another."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    @property
    def _is_serving(self) -> bool:
        """A request has come, and its answer is not out."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self._waits is Waits.REQUEST and not self._is_serving

    def _reads_too_little(self, now_s: float) -> bool:
        """Whether too much of what waited for the client at an earlier look does so still; nothing was added since."""
        unsent = self.transport.get_write_buffer_size()
        full = self.flow.write_paused or self.transport.is_closing() or self.is_idle
        if not unsent or not full or unsent > self._unread_bytes:
            self._unread_since_s, self._unread_bytes = now_s, unsent
        read_s = (self._unread_bytes - unsent) / self._patience.bytes_per_s
        return now_s - self._unread_since_s > self._patience.unread_s + read_s

    def _refuse(self, why: Closed) -> None:
        """Say why, unless an answer is under way, and close."""
        self._closures.count(why)
        if self.transport.is_closing():
            return
        if self._waits is Waits.BODY:
            is_next = self._is_serving and not self.cycle.response_started and not self.pipeline
        else:
            is_next = not self._is_serving  # what we say would answer an earlier request
        if is_next:
            error = REFUSALS[why]
            body = error.body()
            self.transport.write(
                b"%bcontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\nconnection: close\r\n\r\n%b"
                % (STATUS_LINE[error.status], len(body), uuid4().hex.encode(), body)
            )
        self._end()

    def _lingers(self) -> bool:
        """Postpone a close while the client still sends a body: it could not read its answer. Returns whether it does."""
        if self._waits is not Waits.BODY or self._writer.is_closing():
            return False
        self._end()
        return True

    def _end(self) -> None:
        """Send nothing more, and drop what arrives until the client closes or LINGER_S is over."""
        self._wait(Waits.END)
        self._unset_keepalive_if_required()
        self._end_cycles()
        self.flow.resume_writing()
        self.flow.resume_reading()
        self._writer.write_eof()


class BodyPush:
    """Sends some of an answer's body without waiting, past ASGI's `send` and what it makes the caller wait for."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether an answer without a length is under way to a client that reads."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
            and cycle.scope["method"] != "HEAD"
        )

    def send(self, data: bytes) -> None:
        """A chunk; while it is open."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _announces_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")


async def look_at_connections(connections: Iterable[Any], patience: Patience) -> None:
    """Close those whose clients are too late, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(patience.look_s)
        now_s = loop.time()
        for number, connection in enumerate(list(connections), 1):
            if isinstance(connection, Connection):
                connection.look(now_s)
            if number % AT_A_TIME == 0:  # about a millisecond
                await asyncio.sleep(0)
