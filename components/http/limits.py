"""Limits on a client's time, bytes and connections, also for slow consumers, and the refusals."""

import contextlib
import fcntl
import resource
import struct
import termios
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter

SPARE_FILES: Final = 512  # files other than connections
SHED: Final = 16  # a full server closes one in SHED idle connections, plus one

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    head_bytes: int = 64 * 1024  # request line and headers
    head_s: float = 20.0  # from the first byte to the end of the headers
    body_s: float = 20.0  # for a body; plus size / bytes_per_s
    framing: int = 8  # bytes of chunk sizes, extensions and trailers per body byte, plus head_bytes
    rest_bytes: int = 32 * 1024 * 1024  # of a body, discarded after its answer
    requests: int = 100  # unanswered, per connection
    first_s: float = 75.0  # until a connection's first byte
    handshake_s: float = 10.0
    unread_s: float = 20.0  # how far a client may lag behind bytes_per_s
    bytes_per_s: float = 4096.0
    check_every_s: float = 1.0
    connections: int | None = None  # None: the process's file limit less SPARE_FILES


class Closed(StrEnum):
    HEAD_LATE = auto()
    BODY_LATE = auto()
    NOTHING_SENT = auto()
    HANDSHAKE_LATE = auto()
    UNREAD = auto()
    HEAD_TOO_LARGE = auto()
    FRAMING_TOO_LARGE = auto()
    REST_TOO_LARGE = auto()
    MALFORMED = auto()
    HOST = auto()
    HTTP_VERSION = auto()
    UPGRADE = auto()
    TOO_MANY = auto()
    TOO_MANY_REQUESTS = auto()


WriteRefusal = Callable[[int, str], tuple[bytes, bytes]]  # (status, reason) to (content type, body)


def plain_refusal(_: int, reason: str) -> tuple[bytes, bytes]:
    return b"text/plain; charset=utf-8", reason.encode()


# Other reasons close a connection without an answer.
REFUSALS: Final = {
    Closed.HEAD_LATE: (408, "The request's headers took too long."),
    Closed.BODY_LATE: (408, "The request's body took too long."),
    Closed.HEAD_TOO_LARGE: (431, "The request's headers are too large."),
    Closed.FRAMING_TOO_LARGE: (431, "The request's chunk sizes, chunk extensions or trailers are too large."),
    Closed.MALFORMED: (400, "This is not a valid HTTP request."),
    Closed.HOST: (400, "A request needs exactly one Host header."),
    Closed.HTTP_VERSION: (505, "Only HTTP/1.1 and HTTP/1.0 are supported."),
    Closed.UPGRADE: (
        400,
        "A request with a body cannot ask for an upgrade. Send it without the Upgrade header, as HTTP/1.1.",
    ),
    Closed.TOO_MANY: (503, "Too many connections are open. Try again shortly."),
}


class CloseCounter:
    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._counter = Counter(
            "kvmesh_http_connections_closed",
            "Connections that this process closed because of what the client did.",
            ["reason"],
            registry=registry,
        )
        for reason in Closed:
            self._counter.labels(reason)

    def count(self, why: Closed) -> None:
        self._counter.labels(why).inc()


def max_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft // 2, soft - SPARE_FILES)


class OpenConnections:
    """Limits connections and TLS handshakes together."""

    def __init__(self, limit: int, closed: CloseCounter) -> None:
        self.served: Collection[Any] = ()  # uvicorn's own; TLS connections join after their handshake
        self.leaving = False  # a stop is near: connections close after answers that begin now
        self._handshakes: dict[object, Callable[[], object]] = {}  # aborts by connection, oldest first
        self._limit = limit
        self._closed = closed

    @property
    def has_handshakes(self) -> bool:
        return bool(self._handshakes)

    def add_handshake(self, connection: object, abort: Callable[[], object]) -> None:
        self._handshakes[connection] = abort
        self._make_room(connection)

    def remove_handshake(self, connection: object) -> None:
        self._handshakes.pop(connection, None)

    def admit(self, connection: object) -> bool:
        """False: the server is still full."""
        self.remove_handshake(connection)
        return self._make_room(connection)

    def _make_room(self, newcomer: object) -> bool:
        """Abort the oldest handshakes, or close the longest idle connections."""
        if len(self.served) + len(self._handshakes) <= self._limit:
            return True
        others = [other for other in self._handshakes if other is not newcomer]
        closes = [self._handshakes.pop(other) for other in _share(others)] or _share(self._idle(newcomer))
        for close in closes:
            self._closed.count(Closed.TOO_MANY)
            close()
        return bool(closes)

    def _idle(self, newcomer: object) -> list[Callable[[], object]]:
        idle = [other for other in self.served if other is not newcomer and other.is_idle]
        idle.sort(key=lambda other: float(other.since_s))
        return [other.transport.close for other in idle]


def _share(found: Sequence[T]) -> Sequence[T]:
    return found[: len(found) // SHED + 1]


class Unread:
    """Measures how long bytes wait for a client.

    Each byte that the client takes shortens it, even if as many are added. The buffer's size would not show that: an answer in
    equal parts fills it to the same level again and again. The kernel takes bytes in steps of 100 KB or more, so those that it
    has not delivered count as waiting, too.
    """

    def __init__(self, limits: ClientLimits, now_s: float) -> None:
        """`now_s` here and below: loop time."""
        self._limits = limits
        self._since_s = now_s
        self._taken = 0  # bytes, at the latest check

    def held_up(self, seconds: float) -> None:
        self._since_s += seconds

    def is_too_long(self, now_s: float, written: int, waiting: int, *, undelivered: int = 0, is_full: bool) -> bool:
        """Return whether the client is too slow.

        Args:
            written: bytes in all.
            waiting: of those, in this process.
            undelivered: of those, in the kernel.
            is_full: the answer waits for the client; otherwise some bytes may wait.
        """
        delivered = written - waiting - undelivered
        taken, self._taken = delivered - self._taken, delivered
        if waiting and is_full:
            self._since_s = min(now_s, self._since_s + max(0, taken) / self._limits.bytes_per_s)
        else:
            self._since_s = now_s
        return now_s - self._since_s > self._limits.unread_s


def undelivered_bytes(descriptor: int) -> int:
    """Bytes of a socket that the peer has not acknowledged; 0 if the system does not report it."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: -1, of a closed socket
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return int(count)
    return 0
