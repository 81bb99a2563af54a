"""A blocking etcd client for threads that it may block: any member of the cluster will do, and every failure becomes ours."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import grpc

from components.discovery.etcd_stubs import etcd3, etcdrpc
from components.errors import BackendUnavailable

CALL_TIMEOUT_S: Final = 3.0
PROBE_TIMEOUT_S: Final = 1.0  # for one member to prove that it has a quorum; the next one is asked then
HAS_LEADER: Final = (("hasleader", "true"),)  # a member that loses its leader ends the call, instead of going silent
_CHANNEL: Final = (
    # An idle watch notices a dead host within 13 s. gRPC waits 60 s for the answer to a ping, and stops pinging an idle
    # connection, unless the last two options say otherwise.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),  # a watch event may carry the records of a whole fleet
)


def endpoints(url: str) -> list[tuple[str, int]]:
    """(host, port) of each endpoint in a comma-separated list. Raises: ValueError, naming the bad one."""
    found = []
    for one in url.split(","):
        try:
            parts = urlsplit(one.strip() if "//" in one else f"//{one.strip()}")
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is no number, half an IPv6 address
            host = port = None
        if not host:
            raise ValueError(f"etcd endpoint {one!r} is not http://host:port (MESH_ETCD_URL)")
        shown = f"{parts.scheme or 'http'}://{host}:{port or 2379}"  # without the password
        if parts.scheme not in ("", "http"):
            raise ValueError(f"etcd endpoint {shown}: TLS is not supported yet, use http:// (MESH_ETCD_URL)")
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"etcd endpoint {shown}: users and passwords are not supported yet (MESH_ETCD_URL)")
        found.append((host, port or 2379))
    return found


@contextmanager
def etcd_client(url: str) -> Iterator[Any]:
    """Open a client of a member that has a quorum. What goes wrong inside is raised as BackendUnavailable, too."""
    with etcd_errors(url):
        client = _open_any(url)
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
    lease_id: int,
    ttl_s: float,
    stop: threading.Event,
    *,
    renewed: Callable[[float], object] = lambda _: None,
    failed: Callable[[BackendUnavailable, "Backoff"], object] = lambda *_: None,
) -> None:
    """Keep a lease alive until `stop` is set, or until etcd says that the lease is gone.

    An etcd that cannot be reached ends nothing: leases stand still while etcd has no leader, and are extended by its
    next one. So the same lease is refreshed again as soon as any member answers.

    Args:
        url: of etcd.
        lease_id: which lease.
        ttl_s: its time to live, seconds; it is refreshed after a third of that.
        stop: ends this.
        renewed: called after each refresh, with the monotonic time at which the lease expires.
        failed: called after each failure.
    """
    backoff = Backoff(last_s=ttl_s / 3)  # after an outage every lease must be refreshed within its time to live
    while not stop.is_set():
        try:
            with etcd_client(url) as client:
                while True:
                    asked = time.monotonic()
                    if _refresh(client, lease_id) <= 0:
                        return
                    backoff.reset()
                    renewed(asked + ttl_s)
                    if stop.wait(ttl_s / 3):
                        return
        except BackendUnavailable as exc:
            wait_s = backoff.failed()
            failed(exc, backoff)
            stop.wait(wait_s)


def unreachable(url: str, cause: str) -> str:
    """What to say when etcd does not answer."""
    return f"etcd at {url} cannot be reached ({cause}): start it (`make up` starts one) or set MESH_ETCD_URL"


def _refresh(client: Any, lease_id: int) -> int:
    """Refresh a lease. Returns: its time to live in seconds; 0 if it is gone."""
    requests = iter([etcdrpc.LeaseKeepAliveRequest(ID=lease_id)])
    answers = client.leasestub.LeaseKeepAlive(requests, PROBE_TIMEOUT_S, metadata=HAS_LEADER)
    return int(next(iter(answers)).TTL)


def _open_any(url: str) -> Any:
    """Try the members in random order: thousands of processes must not all lean on the first one."""
    members = endpoints(url)
    random.shuffle(members)
    last: Exception | None = None
    for host, port in members:
        client = etcd3.client(host=host, port=port, timeout=CALL_TIMEOUT_S, grpc_options=list(_CHANNEL))
        try:
            # A linearizable read: a member without a quorum would still answer `status`.
            probe = etcdrpc.RangeRequest(key=b"\0", count_only=True)
            client.kvstub.Range(probe, PROBE_TIMEOUT_S if len(members) > 1 else CALL_TIMEOUT_S)
        except grpc.RpcError as exc:
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
    """Waits that double from 0.2 s to 5 s, each shortened by up to a half at random; `reset` after success."""

    def __init__(self, first_s: float = 0.2, last_s: float = 5.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s
        self.failures = 0  # in this outage

    def failed(self) -> float:
        """Seconds to wait before the next try."""
        self.failures += 1
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, self._last_s)
        return wait_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Back to the first wait."""
        self._next_s = self._first_s
        self.failures = 0
