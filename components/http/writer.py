"""Join the writes to a connection in one turn of the event loop.

Each write wakes its reader, which on a busy machine takes this processor and its caches.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Self


class HeldWrites:
    """Holds writes within the context, and then those of tasks that were woken in it."""

    def __init__(self) -> None:
        self._waiting: list[ConnectionWriter] = []
        self.held = False

    def __enter__(self) -> Self:
        self.held = True
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.get_running_loop().call_soon(self._release)
        self._flush()

    def add(self, writer: "ConnectionWriter") -> None:
        """Call `writer.flush()` when writes are no longer held."""
        self._waiting.append(writer)

    def _release(self) -> None:
        self.held = False
        self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.flush()


class ConnectionWriter(asyncio.Transport):
    """A transport whose writes can be held. A close sends held writes first."""

    def __init__(
        self, transport: asyncio.Transport, writes: HeldWrites, lingers: Callable[[], bool] = lambda: False
    ) -> None:
        """`lingers` is called before a close. If it returns True, its owner closes the transport."""
        super().__init__()
        self._lingers = lingers
        self._transport = transport
        self._writes = writes
        self._unsent = b""
        self._is_head = False
        self._ended = False  # writes are dropped
        self.num_bytes = 0  # written

    def expect_head(self) -> None:
        """Hold the next write, an answer's head, until the body begins."""
        self._is_head = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data` before this turn of the loop ends."""
        if self._ended:
            return
        self.num_bytes += len(data)
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
        if self._unsent:
            data, self._unsent = self._unsent, b""
            if self._transport.is_closing():
                return
            try:
                self._transport.write(data)
            except RuntimeError:  # it must not fail other connections' writes
                self.abort()

    def close(self) -> None:
        self.flush()
        if self._lingers():
            return
        self._ended = True
        self._transport.close()

    def abort(self) -> None:
        self._unsent = b""
        self._ended = True
        self._transport.abort()

    def write_eof(self) -> None:
        """Send held writes and the end of the stream, which a TLS client sees only at the close."""
        self.flush()
        self._ended = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._unsent)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
