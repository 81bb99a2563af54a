"""uvicorn's HTTP connection, with limits on the bytes and the time of a client.

uvicorn itself closes only idle connections. A check each second finds late clients, so nothing here runs per token.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from enum import StrEnum, auto
from typing import Any, Final
from uuid import uuid4

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from components.http.limits import (
    REFUSALS,
    ClientLimits,
    CloseCounter,
    Closed,
    OpenConnections,
    Unread,
    WriteRefusal,
    plain_refusal,
    undelivered_bytes,
)
from components.http.writer import ConnectionWriter, HeldWrites

PUSH: Final = "kvmesh.push"  # key of a BodyPush in an ASGI scope
# A close of a socket that is still receiving data would lose the last answer.
LINGER_S: Final = 2.0
# While stopping: wait for the next request of a client that has not received "Connection: close".
LAST_REQUEST_S: Final = 1
CHECKS_PER_TURN: Final = 512  # about 1 ms


class Waits(StrEnum):
    REQUEST = auto()
    HEAD = auto()
    BODY = auto()
    END = auto()  # answered; input is discarded


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        limits: ClientLimits,
        connections: OpenConnections,
        closed: CloseCounter,
        writes: HeldWrites,
        refusal: WriteRefusal = plain_refusal,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._limits = limits
        self._connections = connections
        self._closed = closed
        self._writes = writes
        self._refusal = refusal
        self._cycles: deque[RequestResponseCycle] = deque()  # unanswered requests, in order
        self._waits = Waits.REQUEST
        self.since_s = 0.0  # loop time at which the wait began
        self._taken_bytes = 0  # received since then
        self._body_bytes = 0  # received, of a body
        self._bare_bytes = 0
        self._rest_bytes = 0
        self._moved = False  # the last read had body bytes or ended the wait
        self._fault = Closed.MALFORMED
        self._spared = False  # a stop leaves this connection to its own timer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn's close then sends held writes first
        self.transport = self._writer = ConnectionWriter(transport, self._writes, self._lingers)
        self.since_s = self.loop.time()
        self._unread = Unread(self._limits, self.since_s)
        if not self._connections.admit(self):
            self._refuse(Closed.TOO_MANY)

    def data_received(self, data: bytes) -> None:
        if self._waits is Waits.END:
            self._drop(len(data))
            return
        if self._waits is Waits.REQUEST:
            self._wait(Waits.HEAD)
        self._taken_bytes += len(data)
        self._moved = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._fault)
        if self._waits is Waits.HEAD and self._taken_bytes > self._limits.head_bytes:
            self._refuse(Closed.HEAD_TOO_LARGE)
        elif self._waits is Waits.BODY:
            self._bound_body(len(data))

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]  # this and later requests are answered as plain HTTP
            else:
                return

    def on_message_begin(self) -> None:
        if self._waits is Waits.REQUEST:  # a pipelined request
            self._wait(Waits.HEAD)
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._waits is Waits.HEAD:  # else a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        fault = self._fault_of_head()
        if fault is not None:
            self._fault = fault
            raise httptools.HttpParserError(fault)
        super().on_headers_complete()
        self._writer.expect_head()
        self._cycles.append(self.cycle)
        if self._connections.leaving:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            self.cycle.waiting_for_100_continue = False  # such a client would read 100 as the answer
        if self.scope["http_version"] == "1.0" or self.expect_100_continue:
            self.cycle.send = _suited_send(self.cycle)  # type: ignore[assignment, method-assign]
        self.scope[PUSH] = BodyPush(self.cycle)  # type: ignore[typeddict-unknown-key]  # a server may add its own
        self._wait(Waits.BODY)

    def on_body(self, body: bytes) -> None:
        self._moved = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._wait(Waits.REQUEST)
        if self.cycle.response_complete:  # uvicorn's timer began with the answer, and ended with the rest of the body
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        if self._waits is not Waits.END:
            self._spared = self._connections.leaving
            super().on_response_complete()

    def leave(self) -> None:
        """Send `Connection: close` with the next answer.

        An answer that has begun without it may be followed by a request at once, which a close would lose. So the connection
        waits LAST_REQUEST_S for one more.
        """
        self.timeout_keep_alive = LAST_REQUEST_S
        if self._cycles and not self._cycles[-1].response_started:
            self._cycles[-1].keep_alive = False

    def shutdown(self) -> None:
        """Close if idle. uvicorn would also close right after a running answer."""
        if not (self._is_serving or self._spared):
            self.transport.close()

    def finish(self) -> None:
        """Close if idle, else right after the answer in flight."""
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waits = Waits.END
        self._end_cycles()
        super().connection_lost(exc)

    def held_up(self, seconds: float) -> None:
        """Exclude time in which this process did not run, because the client's data of that time has not been read yet."""
        self.since_s += seconds
        self._unread.held_up(seconds)

    def check(self, now_s: float) -> None:
        limits, waited_s = self._limits, now_s - self.since_s
        if self._reads_too_little(now_s):
            self._closed.count(Closed.UNREAD)
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._waits is Waits.END:
            if waited_s > LINGER_S:
                self.transport.close()
        elif self.flow.read_paused or (self._waits is Waits.HEAD and self._is_serving):
            self.since_s = now_s  # the client waits for the server
        elif self._waits is Waits.HEAD and waited_s > limits.head_s:
            self._refuse(Closed.HEAD_LATE)
        elif self._waits is Waits.BODY and waited_s > limits.body_s + self._taken_bytes / limits.bytes_per_s:
            self._refuse(Closed.BODY_LATE)
        elif self._waits is Waits.REQUEST and self.cycle is None and waited_s > limits.first_s:
            self._closed.count(Closed.NOTHING_SENT)
            self.transport.close()

    def _wait(self, what: Waits) -> None:
        self._waits = what
        self._moved = True
        self.since_s = self.loop.time()
        self._taken_bytes = self._body_bytes = self._bare_bytes = self._rest_bytes = 0

    def _fault_of_head(self) -> Closed | None:
        version = self.parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            return Closed.HTTP_VERSION
        most = self._limits.head_bytes
        if self._taken_bytes > most and self._head_bytes() > most:
            return Closed.HEAD_TOO_LARGE
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            return Closed.HOST
        # httptools would parse the body as the next request
        if self.parser.should_upgrade() and any(_announces_body(name, value) for name, value in self.headers):
            return Closed.UPGRADE
        return Closed.TOO_MANY_REQUESTS if len(self._cycles) >= self._limits.requests else None

    def _bound_body(self, size: int) -> None:
        """Limit framing bytes after a read of `size` bytes.

        httptools copies the whole trailer at each read, so reads without body bytes have a limit of their own.
        """
        limits = self._limits
        self._bare_bytes = 0 if self._moved else self._bare_bytes + size
        framing_bytes = self._taken_bytes - self._body_bytes
        if (
            self._bare_bytes > limits.head_bytes
            or framing_bytes > limits.head_bytes + limits.framing * self._body_bytes
        ):
            self._refuse(Closed.FRAMING_TOO_LARGE)
        elif self.cycle.response_complete:
            self._rest_bytes += size
            if self._rest_bytes > limits.rest_bytes:
                self._refuse(Closed.REST_TOO_LARGE)

    def _drop(self, size: int) -> None:
        self._rest_bytes += size
        if self._rest_bytes > self._limits.rest_bytes:
            self.transport.abort()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _end_cycles(self) -> None:
        """Notify all requests of a disconnect; uvicorn notifies only the last."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        return self._waits is Waits.REQUEST and not self._is_serving

    def _reads_too_little(self, now_s: float) -> bool:
        writer = self._writer
        is_full = self.flow.write_paused or writer.is_closing() or self.is_idle
        waiting, undelivered = writer.get_write_buffer_size(), 0
        if waiting and (peer := writer.get_extra_info("socket")) is not None:
            undelivered = undelivered_bytes(peer.fileno())
        return self._unread.is_too_long(now_s, writer.num_bytes, waiting, undelivered=undelivered, is_full=is_full)

    def _refuse(self, why: Closed) -> None:
        """Answer with the reason, unless another answer is running, and close."""
        self._closed.count(why)
        if self.transport.is_closing():
            return
        if self._waits is Waits.BODY:
            is_next = self._is_serving and not self.cycle.response_started and not self.pipeline
        else:
            is_next = not self._is_serving  # otherwise the refusal would be read as the answer to an earlier request
        if is_next:
            status, reason = REFUSALS[why]
            content_type, body = self._refusal(status, reason)
            self.transport.write(
                b"%bcontent-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\nconnection: close\r\n\r\n%b"
                % (STATUS_LINE[status], content_type, len(body), uuid4().hex.encode(), body)
            )
        self._end()

    def _lingers(self) -> bool:
        """Postpone a close while the client sends a body. Returns whether it did."""
        if self._waits is not Waits.BODY or self._writer.is_closing():
            return False
        self._end()
        return True

    def _end(self) -> None:
        """Stop sending, and discard input for LINGER_S."""
        self._wait(Waits.END)
        self._unset_keepalive_if_required()
        self._end_cycles()
        self.flow.resume_writing()
        self.flow.resume_reading()
        self._writer.write_eof()


class BodyPush:
    """Writes an answer's body without awaiting ASGI's `send`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
            and cycle.scope["method"] != "HEAD"
        )

    def send(self, data: bytes) -> None:
        """Call only while `is_open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _suited_send(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """`cycle.send` for a client of HTTP/1.0, which reads no chunks, or for one that may never send its body."""
    is_old, send = cycle.scope["http_version"] == "1.0", cycle.send
    to_close = False  # the body ends with the connection

    async def suited(message: ASGISendEvent) -> None:
        nonlocal to_close
        if message["type"] == "http.response.start":
            if cycle.waiting_for_100_continue and cycle.more_body:
                cycle.keep_alive = False  # instead of the body the client may send its next request
            to_close = is_old and all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if to_close:
                cycle.chunked_encoding = False
        elif to_close and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks it
        await send(message)

    return suited


def _announces_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")


async def check_connections(connections: Iterable[Any], limits: ClientLimits) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + limits.check_every_s
        await asyncio.sleep(limits.check_every_s)
        now_s = loop.time()
        late_s = now_s - due_s
        for number, connection in enumerate(list(connections), 1):
            if isinstance(connection, Connection):
                if late_s > limits.check_every_s:
                    connection.held_up(late_s)
                connection.check(now_s)
            if number % CHECKS_PER_TURN == 0:
                await asyncio.sleep(0)
