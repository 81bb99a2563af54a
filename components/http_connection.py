"""One HTTP connection: uvicorn's, with bounds on its head and on how long a client may keep it waiting.

uvicorn closes a connection that is idle after a request, and nothing else: a client that sends its headers or its body byte
by byte, or reads none of what it has asked for, would keep the connection and what belongs to it for as long as it likes.
Nothing here runs per token: the transport says when it has more than it can send, and a look once a second finds the late.
"""

import asyncio
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Final
from uuid import uuid4

import httptools
from prometheus_client import CollectorRegistry, Counter
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from components.http_writer import ConnectionWriter, HeldWrites
from components.openai.errors import from_status

PUSH: Final = "kvmesh.push"  # of a scope: a BodyPush
SPARE_FILES: Final = 512  # that a process opens beside its connections
LINGER_S: Final = 2.0  # for a client to read the last word: a socket closed under what it still sends would lose it
AT_A_TIME: Final = 512  # connections looked at before others get their turn
SHED: Final = 16  # one in so many idle connections goes when there are too many


@dataclass(frozen=True, slots=True)
class Patience:
    """What a client may take."""

    head_bytes: int = 64 * 1024  # of request line and headers
    head_s: float = 20.0  # from a request's first byte to the end of its headers
    body_s: float = 20.0  # for a body, and more as it comes, by `bytes_per_s`
    first_s: float = 75.0  # for the first byte of a new connection
    unread_s: float = 20.0  # for what waits to be read, and more as it is
    bytes_per_s: float = 4096.0
    look_s: float = 1.0  # how often all this is looked at
    connections: int | None = None  # at once; None: as many as the process may open, less SPARE_FILES


class Closed(StrEnum):
    """Why a connection was closed, by us."""

    HEAD_LATE = auto()
    BODY_LATE = auto()
    NOTHING_SENT = auto()
    UNREAD = auto()
    HEAD_TOO_LARGE = auto()
    MALFORMED = auto()
    TOO_MANY = auto()


class Waits(StrEnum):
    """For what of its client's."""

    REQUEST = auto()
    HEAD = auto()
    BODY = auto()
    END = auto()  # we have said our last word, and read nothing more


class Closures:
    """Counts of `Closed`."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._counter = Counter(
            "http_connections_closed", "Connections closed for what the client did.", ["reason"], registry=registry
        )
        for reason in Closed:
            self._counter.labels(reason)

    def count(self, why: Closed) -> None:
        """One more."""
        self._counter.labels(why).inc()


REFUSALS: Final = {
    Closed.HEAD_LATE: from_status(408, "The request's headers took too long."),
    Closed.BODY_LATE: from_status(408, "The request's body took too long."),
    Closed.HEAD_TOO_LARGE: from_status(431),
    Closed.MALFORMED: from_status(400, "This is not an HTTP request."),
    Closed.TOO_MANY: from_status(503, "Too many connections are open. Try again shortly."),
}


class Connection(HttpToolsProtocol):
    """See the module. Whatever closes it says so first, where an answer is still possible."""

    def __init__(self, patience: Patience, most: int, closures: Closures, writes: HeldWrites, **options: Any) -> None:
        """Of `most` connections, made by uvicorn with its `options`."""
        super().__init__(**options)
        self._writes = writes
        self._cycles: list[RequestResponseCycle] = []  # of requests that are not answered: others may wait behind one
        self._patience = patience
        self._most = most
        self._closures = closures
        self._waits = Waits.REQUEST
        self._since_s = 0.0  # it waits
        self._taken_bytes = 0  # of what it waits for
        self._head_too_large = False
        self._unread_since_s = 0.0  # so much of ours waits, while nothing is added
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        # in uvicorn's hands too: what waits in it is sent before a close
        self.transport = self._writer = ConnectionWriter(transport, self._writes)
        self._since_s = self._unread_since_s = self.loop.time()
        if len(self.connections) > self._most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, or of several."""
        if self._waits is Waits.END:
            return
        if self._waits is Waits.REQUEST:
            self._wait(Waits.HEAD)
        self._taken_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(Closed.HEAD_TOO_LARGE if self._head_too_large else Closed.MALFORMED)
        except httptools.HttpParserUpgrade:
            return  # to nothing that we speak: the request is answered as it is
        if self._waits is Waits.HEAD and self._taken_bytes > self._patience.head_bytes:
            self._refuse(Closed.HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A further request may follow in the same bytes."""
        if self._waits is Waits.REQUEST:
            self._wait(Waits.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The request can be served; its body may follow."""
        if self._taken_bytes > self._patience.head_bytes and self._head_bytes() > self._patience.head_bytes:
            self._head_too_large = True
            raise httptools.HttpParserError("head too large")
        super().on_headers_complete()
        self._writer.expect_head()
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]
        self.scope[PUSH] = BodyPush(self.cycle)  # type: ignore[typeddict-unknown-key]  # a server may add its own
        self._wait(Waits.BODY)

    def on_message_complete(self) -> None:
        """The request has come whole."""
        super().on_message_complete()
        self._wait(Waits.REQUEST)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._end_cycles()
        super().connection_lost(exc)

    def look(self, now_s: float) -> None:
        """Close the connection if its client is too late with anything."""
        patience, waited_s = self._patience, now_s - self._since_s
        if self._reads_too_little(now_s):
            self._closures.count(Closed.UNREAD)
            self.transport.abort()  # a close would wait for what is unsent to be sent
        elif self.transport.is_closing():
            return
        elif self._waits is Waits.END:
            if waited_s > LINGER_S:
                self.transport.close()
        elif self.flow.read_paused or (self._waits is Waits.HEAD and self._is_serving):
            self._since_s = now_s  # it is our turn
        elif self._waits is Waits.HEAD and waited_s > patience.head_s:
            self._refuse(Closed.HEAD_LATE)
        elif self._waits is Waits.BODY and waited_s > patience.body_s + self._taken_bytes / patience.bytes_per_s:
            self._refuse(Closed.BODY_LATE)
        elif self._waits is Waits.REQUEST and self.cycle is None and waited_s > patience.first_s:
            self._closures.count(Closed.NOTHING_SENT)
            self.transport.close()

    def _wait(self, what: Waits) -> None:
        self._waits = what
        self._since_s = self.loop.time()
        self._taken_bytes = 0

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
    def _is_idle(self) -> bool:
        return self._waits is Waits.REQUEST and not self._is_serving

    def _reads_too_little(self, now_s: float) -> bool:
        """Whether too much of what waited for the client at an earlier look does so still; nothing was added since."""
        unsent = self.transport.get_write_buffer_size()
        full = self.flow.write_paused or self.transport.is_closing() or self._is_idle
        if not unsent or not full or unsent > self._unread_bytes:
            self._unread_since_s, self._unread_bytes = now_s, unsent
        read_s = (self._unread_bytes - unsent) / self._patience.bytes_per_s
        return now_s - self._unread_since_s > self._patience.unread_s + read_s

    def _make_room(self) -> None:
        """Of connections that are too many, those go that have been idle for longest; without any of these, this one."""
        others: Iterable[Any] = self.connections
        idle = [other for other in others if isinstance(other, Connection) and other is not self and other._is_idle]
        idle.sort(key=lambda other: other._since_s)
        for other in idle[: len(idle) // SHED + 1]:
            self._closures.count(Closed.TOO_MANY)
            other.transport.close()
        if not idle:
            self._refuse(Closed.TOO_MANY)

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
        self._wait(Waits.END)
        self._unset_keepalive_if_required()
        self._end_cycles()
        self.flow.resume_writing()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS
            self.transport.close()


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


def most_connections() -> int:
    """That this process may have at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft // 2, soft - SPARE_FILES)
