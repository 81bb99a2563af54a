"""A blocking etcd client for threads that it may block: endpoints tried in turn, every failure made ours."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import grpc

from components.discovery.etcd_stubs import etcd3
from components.errors import BackendUnavailable

CALL_TIMEOUT_S: Final = 3.0
_CHANNEL: Final = (
    ("grpc.keepalive_time_ms", 10_000),  # a dead server is noticed in 13 s also by an idle watch
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_retries", 0),
)


def endpoints(url: str) -> list[tuple[str, int]]:
    """(host, port) of each endpoint in a comma-separated list. Raises: ValueError, naming the bad one."""
    found = []
    for one in url.split(","):
        try:
            parts = urlsplit(one.strip() if "//" in one else f"//{one.strip()}")
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is none, half an IPv6 address
            host = port = None
        if not host:
            raise ValueError(f"etcd endpoint {one!r} is not http://host:port (MESH_ETCD_URL)")
        found.append((host, port or 2379))
    return found


@contextmanager
def etcd_client(url: str) -> Iterator[Any]:
    """A client of the first endpoint that answers; what goes wrong inside, too, comes out as BackendUnavailable."""
    with etcd_errors(url):
        client = _first_answering(url)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def etcd_errors(url: str) -> Iterator[None]:
    """Turn etcd3's and gRPC's exceptions into BackendUnavailable with address, cause and what to do."""
    try:
        yield
    except grpc.RpcError as exc:
        raise BackendUnavailable(unreachable(url, _cause(exc)), etcd_url=url) from exc
    except etcd3.Etcd3Exception as exc:
        raise BackendUnavailable(unreachable(url, str(exc) or type(exc).__name__), etcd_url=url) from exc


def keep_lease(
    url: str,
    client: Any,
    lease: Any,
    expires: float,
    stop: threading.Event,
    *,
    renewed: Callable[[float], object] = lambda _: None,
) -> None:
    """Keep the lease alive at a third of what remains of it; returns when it is lost or `stop` is set.

    Args:
        url: of etcd, for whoever reads of its failures.
        client: whose lease it is.
        lease: to be refreshed.
        expires: monotonic time at which etcd drops it, unless it is refreshed.
        stop: ends this.
        renewed: is told each new `expires`.
    Raises: BackendUnavailable, when the lease must have run out without an answer; not later than etcd drops it.
    """
    while not stop.wait(max(0.05, (expires - time.monotonic()) / 3)):
        asked = time.monotonic()
        client.timeout = max(0.05, min(CALL_TIMEOUT_S, expires - asked))
        try:
            with etcd_errors(url):
                answers = lease.refresh()
        except BackendUnavailable:
            if time.monotonic() >= expires:
                raise
            continue
        if not answers or answers[-1].TTL <= 0:
            return
        expires = asked + answers[-1].TTL
        renewed(expires)


def unreachable(url: str, cause: str) -> str:
    """What to say when etcd does not answer."""
    return f"etcd at {url} cannot be reached ({cause}): start it (`make up` starts one) or set MESH_ETCD_URL"


def _first_answering(url: str) -> Any:
    last: Exception | None = None
    for host, port in endpoints(url):
        client = etcd3.client(host=host, port=port, timeout=CALL_TIMEOUT_S, grpc_options=list(_CHANNEL))
        try:
            client.status()
        except (etcd3.Etcd3Exception, grpc.RpcError) as exc:
            client.close()
            last = exc
        else:
            return client
    assert last is not None
    raise last


def _cause(exc: grpc.RpcError) -> str:
    details = exc.details() if hasattr(exc, "details") else None
    return details or type(exc).__name__


class Backoff:
    """Waits that double from 0.2 s to 5 s; `reset` after success."""

    def __init__(self, first_s: float = 0.2, last_s: float = 5.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s
        self.since: float | None = None  # monotonic time of the first failure of this outage

    def failed(self) -> float:
        """Seconds to wait before the next try."""
        self.since = self.since or time.monotonic()
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, self._last_s)
        return wait_s

    def reset(self) -> None:
        """Back to the first wait."""
        self._next_s = self._first_s
        self.since = None
