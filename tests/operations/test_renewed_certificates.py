"""Certificates are renewed under load before they expire; then the authority is replaced. Only etcd is restarted, because it
reads its authorities at the start. No request fails.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import httpx
import pytest
from cryptography import x509

from components.certificates import TlsFiles
from components.permissions import ADMINISTRATOR, ROLES
from services.local.accounts import GATEWAY, Accounts, Backends
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from tests.mesh.clusters import Proxy
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MODEL
from tests.mesh.preloaded import Preloaded
from tests.operations.owned_servers import OwnedServers, owned_servers
from tests.operations.rolling_mesh import ENV, RollingMesh, rolling_mesh
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.secure]

STREAM_TOKENS: Final = 60
NAMESPACE: Final = "renewed"
SHORT: Final = timedelta(seconds=60)  # the mesh is up before that
AFTER_S: Final = 4.0  # two leases of etcd
SERVERS: Final = ("etcd", "nats")
ROLE_OF: Final = {
    **{role: role for role in ROLES if role != "frontend"},
    **{f"frontend-{number}": "frontend" for number in range(4)},
}


@dataclass(slots=True)
class Live:
    """The files of all processes, which the test replaces like a tool that renews certificates."""

    home: Path

    @property
    def ca(self) -> Path:
        return self.home / "ca.pem"

    def files(self, name: str) -> TlsFiles:
        return TlsFiles(ca=self.ca, certificate=self.home / f"{name}.pem", key=self.home / f"{name}.key")

    def renew(self, authority: Authority) -> None:
        """Issue a certificate of `authority` for each user and server."""
        users = [(user, (), True) for user in (*ROLE_OF, ADMINISTRATOR)]
        others = [(GATEWAY, (), False), *((server, NAMES_OF_THIS_MACHINE, True) for server in SERVERS)]
        for name, hosts, is_user in [*users, *others]:
            issued = authority.issue(name, hosts, is_user=is_user)
            assert issued.key is not None
            assert issued.certificate is not None
            put(issued.key.read_bytes(), self.home / f"{name}.key")
            put(issued.certificate.read_bytes(), self.home / f"{name}.pem")

    def trust(self, *authorities: Authority) -> None:
        put(b"".join(authority.ca.read_bytes() for authority in authorities), self.ca)

    def until_expired(self, name: str) -> None:
        """Wait until the current certificate of a file has expired."""
        ends = x509.load_pem_x509_certificate((self.home / f"{name}.pem").read_bytes()).not_valid_after_utc
        time.sleep(max(0.0, (ends - datetime.now(UTC)).total_seconds()) + 1.0)


def put(content: bytes, path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(0o600)
    new.replace(path)


@dataclass(slots=True)
class SecureMesh:
    mesh: RollingMesh
    servers: OwnedServers
    proxies: Sequence[Proxy]
    live: Live

    @contextmanager
    def nothing_fails(self, what: str) -> Iterator[None]:
        self.mesh.load.until_calm()
        with self.mesh.load.window() as seen:
            yield
            time.sleep(AFTER_S)
        print(f"\n{what}: {seen}")  # noqa: T201 - the figures are of interest where nothing failed, too
        assert not seen.failed
        assert not seen.wrong
        assert seen.answered
        assert seen.stream_events

    def cut_all(self) -> None:
        """End every connection to etcd and NATS, which continue."""
        for proxy in self.proxies:
            proxy.shut()
            proxy.open()

    def restart_etcd(self) -> None:
        self.servers.kill(self.servers.etcd)
        self.servers.start(self.servers.etcd)

    def connections(self) -> int:
        """Return the number of connections that NATS has accepted."""
        page = httpx.get(f"{self.servers.nats.monitor_url}/varz", timeout=PATIENCE_S)
        return int(page.json()["total_connections"])


@pytest.fixture
def first(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "first")


@pytest.fixture
def secure(first: Authority, preloaded: Preloaded, tmp_path: Path) -> Iterator[SecureMesh]:
    """Its certificates are valid for a short time, its authority for a year."""
    live = Live(tmp_path / "live")
    live.home.mkdir(mode=0o700)
    first.life = SHORT
    live.renew(first)
    live.trust(first)
    certificates = {name: live.files(name) for name in (*ROLE_OF, ADMINISTRATOR, GATEWAY, *SERVERS)}
    accounts = Accounts(NAMESPACE, ROLE_OF, {}, certificates)
    with (
        owned_servers(tmp_path, accounts) as servers,
        Proxy(servers.etcd.url) as to_etcd,
        Proxy(servers.nats.url) as to_nats,
    ):
        reach = lambda user: Backends(to_etcd.url, to_nats.url, user, live.files(user))  # noqa: E731
        processes = MeshProcesses(to_etcd.url, to_nats.url, NAMESPACE, tmp_path, MODEL, ENV, preloaded, reach=reach)
        with processes, rolling_mesh(processes, STREAM_TOKENS) as mesh:
            yield SecureMesh(mesh, servers, (to_etcd, to_nats), live)


def test_certificates_and_their_authority_are_replaced_while_streams_run(
    first: Authority, secure: SecureMesh, tmp_path: Path
) -> None:
    live, nats = secure.live, secure.servers.nats
    processes = len(secure.mesh.processes.workers)
    before = secure.connections()
    with secure.nothing_fails("renewed, and the old ones have expired"):
        old = Live(tmp_path / "old")
        shutil.copytree(live.home, old.home)
        first.life = timedelta(days=1)
        live.renew(first)
        secure.servers.reload(nats)
        old.until_expired("nats")
        assert secure.connections() == before, "a renewal ends no connection"
        secure.cut_all()
    second = Authority(tmp_path / "second")
    with secure.nothing_fails("both authorities trusted"):
        live.trust(first, second)
        secure.servers.reload(nats)
        secure.restart_etcd()
    with secure.nothing_fails("certificates of the second authority"):
        live.renew(second)
        secure.servers.reload(nats)
        secure.cut_all()
    with secure.nothing_fails("the first authority no longer trusted"):
        live.trust(second)
        secure.servers.reload(nats)
        secure.restart_etcd()
        secure.cut_all()
    assert secure.connections() >= before + 3 * processes
