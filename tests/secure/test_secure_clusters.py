"""Clusters of three etcd and three NATS servers with TLS among their members, a mesh over them, and strangers."""

import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

import httpx
import pytest

from components.certificates import Certificates
from components.credentials import EtcdAccess
from components.discovery.etcd import etcd_client
from components.discovery.etcd_users import admit
from components.permissions import ADMINISTRATOR
from services.local.accounts import Accounts, Backends
from services.local.authority import Authority
from services.local.servers import HOST
from tests.mesh.clusters import EtcdCluster, Member, NatsCluster, _get_json
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.preloaded import Preloaded
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

NAMESPACE: Final = "clusters"
ENV: Final = {
    **MOCK_ENV,
    "MESH_FRONTEND_MAX_STORED_RESPONSES": "0",
    "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    "MESH_ENGINE__MOCK__ANSWER_TOKENS": "0",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters")


@pytest.fixture(scope="module")
def accounts(home: Path) -> Accounts:
    return Accounts.make(NAMESPACE, 1, home / "tls")


@pytest.fixture(scope="module")
def etcd(home: Path, accounts: Accounts) -> Iterator[EtcdCluster]:
    with EtcdCluster(home, accounts) as cluster:
        with etcd_client(cluster.url, EtcdAccess(Certificates(accounts.certificates[ADMINISTRATOR]))) as client:
            admit(client, NAMESPACE, accounts.roles)
        yield cluster


@pytest.fixture(scope="module")
def nats(home: Path, accounts: Accounts) -> Iterator[NatsCluster]:
    with NatsCluster(home, accounts) as cluster:
        yield cluster


def strange(home: Path) -> ssl.SSLContext:
    """Make a context with a certificate of another authority."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    files = Authority(home / "strangers").issue("peer", (HOST,))
    assert files.certificate is not None
    context.load_cert_chain(files.certificate, files.key)
    return context


def is_let_in(port: int, context: ssl.SSLContext, first: bytes, before: int = 0) -> bool:
    """Whether a peer's port answers `first` after a handshake.

    Args:
        before: bytes that the server sends in plain text first.
    """
    with socket.create_connection((HOST, port), PATIENCE_S) as plain:
        if before:
            plain.recv(before)
        try:
            with context.wrap_socket(plain) as secure:
                secure.sendall(first)
                return secure.recv(1024) != b""
        except (ssl.SSLError, ConnectionError):
            return False


def own(accounts: Accounts, server: str) -> ssl.SSLContext:
    return Certificates(accounts.certificates[server]).current().context


HELLO: Final = b"GET /members HTTP/1.1\r\nHost: etcd\r\n\r\n"


def test_etcds_peers_want_a_certificate_of_the_same_authority(
    etcd: EtcdCluster, accounts: Accounts, tmp_path: Path
) -> None:
    port = etcd.members[0].second_port
    with socket.create_connection((HOST, port), PATIENCE_S) as plain:
        plain.sendall(HELLO)
        assert b"members" not in plain.recv(1024)
    assert not is_let_in(port, strange(tmp_path), HELLO)
    context = own(accounts, "etcd")
    context.check_hostname = False  # without a host name
    assert is_let_in(port, context, HELLO)


def test_nats_peers_want_a_certificate_of_the_same_authority(
    nats: NatsCluster, accounts: Accounts, home: Path, tmp_path: Path
) -> None:
    """A fourth server with its own certificate gets no route; one of the mesh's authority does."""
    stranger = Accounts.make(NAMESPACE, 1, tmp_path / "tls")
    wanted = {"stranger": (stranger, 0), "friend": (accounts, 3)}
    for name, (its, routes) in wanted.items():
        other = NatsCluster(tmp_path / name, its)
        member = replace(other.members[0], name="fourth", home=tmp_path / name / "fourth")  # names are unique
        other.members = [member, *nats.members]
        try:
            start_alone(other, member)
            until_routes(member, routes)
        finally:
            member.kill()


def start_alone(cluster: NatsCluster, member: Member) -> None:
    with mock.patch.object(cluster, "until_whole"):  # it may never be whole
        cluster.start([member])


def until_routes(member: Member, count: int) -> None:
    """Wait for routes to `count` members; for 0, check that none appear."""

    def routes() -> int | None:
        shown = _get_json(member.second_port, "/routez", method="GET")
        return None if shown is None else len({one["remote_id"] for one in shown["routes"]})

    wait_until(lambda: routes() == count, lambda: f"{count} routes, not {routes()}")
    if not count:
        time.sleep(4)
        assert routes() == 0


def test_a_mesh_serves_over_them_and_outlives_a_member_of_each(
    etcd: EtcdCluster, nats: NatsCluster, accounts: Accounts, preloaded: Preloaded, tmp_path: Path
) -> None:
    def reach(user: str) -> Backends:
        return Backends(etcd.url, nats.url, user, accounts.certificates[user])

    def answer(url: str) -> int:
        body = {"model": "mock", "prompt": list(range(1, 100)), "max_tokens": 8, "ignore_eos": True}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code

    with MeshProcesses(etcd.url, nats.url, NAMESPACE, tmp_path, "mock", ENV, preloaded, reach=reach) as mesh:
        mesh.start("bootstrap", "prefill", "decode")
        url = mesh.start_one("frontend").url
        wait_until(lambda: answer(url) == 200)
        etcd.members[0].kill()
        nats.busiest().kill()
        wait_until(lambda: answer(url) == 200)  # requests whose calls were lost with the server are sent again
        late = mesh.start_one("decode")  # it registers with the members that are left
        assert "violation" not in late.logged()
        for worker in mesh.workers:
            assert worker.popen.poll() is None, worker.logged()
            assert "violation" not in worker.logged().lower()
