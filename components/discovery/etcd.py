"""A blocking etcd client that uses any member of the cluster. Its errors are BackendUnavailable."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc

from components.backoff import Backoff
from components.certificates import Pem
from components.credentials import EtcdAccess
from components.discovery.etcd_stubs import etcd3, etcdrpc
from components.errors import BackendUnavailable
from components.local_mesh import ENV_OF_LOCAL_MESH
from components.startup import WrongSettings
from components.urls import Login, server_parts, wants_tls, without_password

CALL_TIMEOUT_S: Final = 3.0
PROBE_TIMEOUT_S: Final = 1.0  # for one member to prove that it has a quorum
HAS_LEADER: Final = (("hasleader", "true"),)  # a member that loses its leader ends the call
_CHANNEL: Final = (
    # A dead host shows in 13 s; by default gRPC does not ping idle connections.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),  # a watch event may contain a whole fleet's records
)
ANYONE: Final = EtcdAccess()
FREE_SPACE: Final = (
    "run `etcdctl compact` with the latest revision, `etcdctl defrag` and `etcdctl alarm disarm`; to prevent it, start "
    "etcd with --auto-compaction-retention or a larger --quota-backend-bytes"
)


class NotAllowed(BackendUnavailable):
    """This user has no right to a key, but may get it later."""


class DatabaseFull(BackendUnavailable):
    """etcd accepts no writes and grants no leases until an operator frees space; reads work."""


class Endpoint(NamedTuple):
    host: str
    port: int
    user: str | None
    password: str | None
    secure: bool = False


def endpoints(url: str) -> list[Endpoint]:
    """The members in MESH_ETCD_URL. Raises: WrongSettings."""
    members = [_endpoint(one.strip()) for one in url.split(",")]
    try:
        secure = wants_tls(url, "http", "https", "MESH_ETCD_URL")
    except ValueError as exc:
        raise WrongSettings(f"etcd endpoints {exc}") from exc
    return [member._replace(secure=secure) for member in members]


def check_access(url: str, access: EtcdAccess) -> None:
    """Check the settings here rather than in a thread. Raises: WrongSettings."""
    if endpoints(url)[0].secure:
        access.certificates.current()
    if access.login is not None:
        access.login.current()


def _endpoint(url: str) -> Endpoint:
    shown = without_password(url)
    if (parts := server_parts(url)) is None:
        raise WrongSettings(f"etcd endpoint {shown!r} is not http://host:port (MESH_ETCD_URL)")
    if (parts.username is None) != (parts.password is None):
        raise WrongSettings(
            f"etcd endpoint {shown}: give user and password, http://user:password@host:port (MESH_ETCD_URL)"
        )
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    return Endpoint(parts.hostname or "", parts.port or 2379, user, password)


@contextmanager
def etcd_client(url: str, access: EtcdAccess = ANYONE) -> Iterator[Any]:
    """A client of a member that has a quorum. Each new one reads changed files of `access` again."""
    with etcd_errors(url):
        client = _open_any(url, access)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def etcd_errors(url: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as exc:
        cause, where = _cause(exc), without_password(url)
        if "permission denied" in cause:
            raise NotAllowed(refused(url, cause), etcd_url=where) from exc
        if "database space exceeded" in cause:
            raise DatabaseFull(f"etcd at {where} is full ({cause}): {FREE_SPACE}", etcd_url=where) from exc
        says = refused if _is_refusal(exc) else unreachable
        raise BackendUnavailable(says(url, cause), etcd_url=where) from exc
    except etcd3.Etcd3Exception as exc:
        raise BackendUnavailable(
            unreachable(url, str(exc) or type(exc).__name__), etcd_url=without_password(url)
        ) from exc


def keep_lease(
    url: str,
    lease_id: int,
    ttl_s: float,
    stop: threading.Event,
    *,
    access: EtcdAccess,
    renewed: Callable[[float], object],
    failed: Callable[[BackendUnavailable, Backoff], object],
) -> None:
    """Renew a lease until `stop` is set or etcd has dropped it.

    After a failure, retry the same lease: without a leader no lease expires, and the next leader extends it.

    Args:
        renewed: called with the monotonic time at which the lease expires.
        failed: called after each failure.
    """
    backoff = Backoff(last_s=ttl_s / 3)  # after an outage, the lease must be renewed in time
    while not stop.is_set():
        try:
            with etcd_client(url, access) as client:
                while True:
                    began_s = time.monotonic()
                    if _refresh(client, lease_id) <= 0:
                        return
                    backoff.reset()
                    renewed(began_s + ttl_s)
                    if stop.wait(ttl_s / 3):
                        return
        except BackendUnavailable as exc:
            wait_s = backoff.failed()
            failed(exc, backoff)
            stop.wait(wait_s)


def revoke_lease(url: str, lease_id: int, access: EtcdAccess = ANYONE) -> None:
    """Revoke a lease, which removes its keys. If etcd cannot be reached, the lease expires.

    Use a new client: an idle one's login token expires after five minutes.
    """
    with suppress(BackendUnavailable), etcd_client(url, access) as client:
        client.revoke_lease(lease_id)


def unreachable(url: str, cause: str) -> str:
    if any(word in cause.lower() for word in ("ssl", "handshake", "certificate")):
        return (
            f"etcd at {without_password(url)} and this process do not agree on TLS ({cause}): the address must begin with "
            "https:// if etcd uses TLS; MESH_TLS__CA must have signed etcd's certificate, which must name this host; "
            "MESH_TLS__CERTIFICATE must be one that etcd accepts"
        )
    return f"etcd at {without_password(url)} cannot be reached ({cause}): start one, or set MESH_ETCD_URL; {ENV_OF_LOCAL_MESH}"


def refused(url: str, cause: str) -> str:
    where = without_password(url)
    if "permission denied" in cause:
        return (
            f"etcd at {where} denies this user a key ({cause}): run `python -m components.discovery.etcd_users` with the "
            "access of root to give each role its rights"
        )
    return (
        f"etcd at {where} refuses this login ({cause}): set MESH_ETCD_URL=http://user:password@host:port, or "
        "MESH_ETCD_LOGIN_FILE to a file with user:password"
    )


def _refresh(client: Any, lease_id: int) -> int:
    """Time to live in seconds; 0: the lease is gone."""
    requests = iter([etcdrpc.LeaseKeepAliveRequest(ID=lease_id)])
    answers = client.leasestub.LeaseKeepAlive(requests, PROBE_TIMEOUT_S, metadata=HAS_LEADER)
    return int(next(iter(answers)).TTL)


def _open_any(url: str, access: EtcdAccess) -> Any:
    members = endpoints(url)
    random.shuffle(members)  # processes must not all use the first
    last: Exception | None = None
    for member in members:
        client = _open(member, access)
        timeout_s = PROBE_TIMEOUT_S if len(members) > 1 else CALL_TIMEOUT_S
        try:
            if (login := _login(member, access)).user is not None:
                _log_in(client, login, timeout_s)
            _prove_quorum(client, timeout_s)
        except grpc.RpcError as exc:
            client.close()
            last = exc
        else:
            return client
    assert last is not None
    raise last


def _open(member: Endpoint, access: EtcdAccess) -> Any:
    options = {"timeout": CALL_TIMEOUT_S, "grpc_options": list(_CHANNEL)}
    if member.secure:
        return _SecureClient(access.certificates.current().pem, host=member.host, port=member.port, **options)
    return etcd3.client(host=member.host, port=member.port, **options)


class _SecureClient(etcd3.Etcd3Client):  # type: ignore[misc]
    def __init__(self, pem: Pem, **options: Any) -> None:
        self._pem = pem
        super().__init__(ca_cert="", **options)  # not None: a secure channel

    def _get_secure_creds(self, *_: object) -> Any:
        """Use PEM data, because files may change between the reads of certificate and key."""
        return grpc.ssl_channel_credentials(*self._pem)


def _prove_quorum(client: Any, timeout_s: float) -> None:
    """Raises: grpc.RpcError."""
    try:
        # a linearizable read needs a quorum, `status` does not
        client.kvstub.Range(etcdrpc.RangeRequest(key=b"\0", count_only=True), timeout_s)
    except grpc.RpcError as exc:
        # etcd checks rights only after the quorum has answered
        if exc.code() is not grpc.StatusCode.PERMISSION_DENIED:
            raise


def _login(member: Endpoint, access: EtcdAccess) -> Login:
    if member.user is not None or access.login is None:
        return Login(member.user, member.password)
    return access.login.current()


def _log_in(client: Any, login: Login, timeout_s: float) -> None:
    """Add a token to all calls, because gRPC refuses etcd3's call credentials without TLS."""
    asked = etcdrpc.AuthenticateRequest(name=login.user, password=login.password)
    token = etcdrpc.AuthStub(client.channel).Authenticate(asked, timeout_s).token
    client.channel = grpc.intercept_channel(client.channel, _Token(token))
    client.kvstub = etcdrpc.KVStub(client.channel)
    client.leasestub = etcdrpc.LeaseStub(client.channel)


class _Token(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._metadata = (("token", token),)

    def intercept_unary_unary(self, call: Any, details: Any, request: Any) -> Any:
        return call(self._with_token(details), request)

    def intercept_stream_stream(self, call: Any, details: Any, requests: Any) -> Any:
        return call(self._with_token(details), requests)

    def _with_token(self, details: Any) -> Any:
        return details._replace(metadata=(*(details.metadata or ()), *self._metadata))


def _is_refusal(exc: grpc.RpcError) -> bool:
    """Return whether etcd refused the login. It returns INVALID_ARGUMENT for a wrong or missing password."""
    if not hasattr(exc, "code"):
        return False
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    return exc.code() in refusals or any(words in _cause(exc) for words in ("authentication", "user name is empty"))


def _cause(exc: grpc.RpcError) -> str:
    details = exc.details() if hasattr(exc, "details") else None
    return details or type(exc).__name__
