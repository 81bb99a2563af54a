"""What connections have to send, written in one go where much is sent in one turn of the event loop.

A write wakes whoever reads, and on a busy machine the reader takes this processor: a loop that makes an event, writes it, and
makes the next one is thrown out of its caches at each.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Self


class HeldWrites:
    """The writes of one turn of the event loop."""

    def __init__(self) -> None:
        self._late: list[ConnectionWriter] = []
        self.held = False

    def __enter__(self) -> Self:
        """What is written inside waits for its end, and what those write who were woken inside waits for the last of them."""
        self.held = True
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.get_running_loop().call_soon(self._release)
        self._flush()

    def add(self, writer: "ConnectionWriter") -> None:
        """It has something to send, and is to be told when."""
        self._late.append(writer)

    def _release(self) -> None:
        self.held = False
        self._flush()

    def _flush(self) -> None:
        late, self._late = self._late, []
        for writer in late:
            writer.flush()


class ConnectionWriter(asyncio.Transport):
    """A connection's transport, whose writes can be held; closing it sends them first."""

    def __init__(
        self, transport: asyncio.Transport, writes: HeldWrites, lingers: Callable[[], bool] = lambda: False
    ) -> None:
        """`lingers`: asked before a close, whether somebody else closes the connection later."""
        super().__init__()
        self._lingers = lingers
        self._transport = transport
        self._writes = writes
        self._unsent = b""
        self._is_head = False
        self._ended = False  # what is written from now on goes nowhere

    def expect_head(self) -> None:
        """What is written next is an answer's head: it leaves with what follows, and wakes the client once."""
        self._is_head = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send it; a head leaves at the end of this turn of the loop at the latest, and so does what is held."""
        if self._ended:
            return
        if self._unsent:
            self._unsent += data
            if not self._writes.held:
                self.flush()
        elif self._writes.held:
            self._unsent = bytes(data)
            self._writes.add(self)
        elif self._is_head:
            self._unsent = bytes(data)
            asyncio.get_running_loop().call_soon(self.flush)
        else:
            self._transport.write(data)
        self._is_head = False

    def flush(self) -> None:
        """Send what waits."""
        if self._unsent:
            data, self._unsent = self._unsent, b""
            if self._transport.is_closing():
                return
            try:
                self._transport.write(data)
            except RuntimeError:  # it takes no more; what others wrote stands behind this
                self.abort()

    def close(self) -> None:
        """After what was written."""
        self.flush()
        if self._lingers():
            return
        self._ended = True
        self._transport.close()

    def abort(self) -> None:
        """At once."""
        self._unsent = b""
        self._ended = True
        self._transport.abort()

    def write_eof(self) -> None:
        """After what was written, and nothing after it; over TLS the client cannot be told so before the close."""
        self.flush()
        self._ended = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def can_write_eof(self) -> bool:
        """Whether the client is told that nothing follows."""
        return self._transport.can_write_eof()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size() + len(self._unsent)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio's."""
        return self._transport.get_extra_info(name, default)
