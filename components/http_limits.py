"""What one client's connection may take of this process, and how a connection that takes more is refused."""

import resource
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from components.openai.errors import from_status

SPARE_FILES: Final = 512  # that a process opens beside its connections


@dataclass(frozen=True, slots=True)
class Patience:
    """What a client may take."""

    head_bytes: int = 64 * 1024  # of request line and headers
    head_s: float = 20.0  # from a request's first byte to the end of its headers
    body_s: float = 20.0  # for a body, and more as it comes, by `bytes_per_s`
    framing: int = 8  # bytes of chunk sizes, extensions and trailers for each byte of the body, beside `head_bytes`
    rest_bytes: int = 32 * 1024 * 1024  # of a body that are read and dropped after its answer
    requests: int = 100  # unanswered ones of one connection
    first_s: float = 75.0  # for the first byte of a new connection
    handshake_s: float = 10.0  # for a TLS handshake
    unread_s: float = 20.0  # for what waits to be read, and more as it is
    bytes_per_s: float = 4096.0
    look_s: float = 1.0  # how often all this is looked at
    connections: int | None = None  # at once; None: as many as the process may open, less SPARE_FILES


class Closed(StrEnum):
    """Why a connection was closed, by us."""

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


REFUSALS: Final = {  # of those that may have to be told: the others come behind an answer, or when nothing was asked
    Closed.HEAD_LATE: from_status(408, "The request's headers took too long."),
    Closed.BODY_LATE: from_status(408, "The request's body took too long."),
    Closed.HEAD_TOO_LARGE: from_status(431),
    Closed.FRAMING_TOO_LARGE: from_status(
        431, "The request's chunk sizes, chunk extensions or trailers are too large."
    ),
    Closed.MALFORMED: from_status(400, "This is not an HTTP request."),
    Closed.HOST: from_status(400, "A request needs one Host header, and no more than one."),
    Closed.HTTP_VERSION: from_status(505, "Only HTTP/1.1 and HTTP/1.0 are supported."),
    Closed.UPGRADE: from_status(
        400, "A request with a body cannot ask for an upgrade. Send it without the Upgrade header, as HTTP/1.1."
    ),
    Closed.TOO_MANY: from_status(503, "Too many connections are open. Try again shortly."),
}


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


def most_connections() -> int:
    """That this process may have at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft // 2, soft - SPARE_FILES)
