"""make upgrade-test: services of an earlier commit are replaced by today's, under load. No request fails, no text differs.

EARLIER names the commit, a tag for example. Without it there are two: the newest one with another wire protocol, and the
newest release, or if there is none the oldest commit, with the same protocol.
"""

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from components.discovery.registry import join_registry
from components.wire.codec import PROTOCOL
from components.wire.instances import Role
from tests.mesh.harness import MeshProcesses, Worker
from tests.mesh.mocks import MODEL
from tests.mesh.preloaded import Fork, Preloaded
from tests.operations import earlier
from tests.operations.rolling_mesh import ENV, RollingMesh, rolling_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.upgrades, pytest.mark.timeout(300)]

STREAM_TOKENS: Final = 60  # 2.4 s
AFTER_S: Final = 1.0
IDLE_S: Final = 1.5  # the load closes idle connections after 1 s
ORDER: Final[tuple[Role, ...]] = ("bootstrap", "prefill", "decode", "frontend")
ORDERS: Final = (ORDER, ORDER[::-1])  # each of two services is once the newer one


@dataclass(slots=True)
class TwoReleases(MeshProcesses):
    """Starts services of `tree` until `upgrading` is set, then today's."""

    tree: Path = field(kw_only=True)
    upgrading: bool = False

    def _run(self, module: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | Fork:
        if self.upgrading:
            return super(TwoReleases, self)._run(module, env, log)
        known = {name: value for name, value in env.items() if name != "MESH_FRONTEND_UNREADY_S"}
        with log.open("wb") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", module.replace("tests.mesh.verbose_frontend", "services.frontend")],
                cwd=self.tree,
                env={**known, "PYTHONPATH": str(self.tree)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )


@dataclass(slots=True)
class Upgrade:
    mesh: RollingMesh
    processes: TwoReleases

    def replace(self, role: str) -> None:
        """Replace its processes one by one."""
        for worker in self.processes.workers[:]:
            if worker.role == role and worker.popen.poll() is None:
                self.stop(worker)
                self.mesh.start(role)

    def stop(self, worker: Worker) -> None:
        """Remove it from the balancer first, since an earlier frontend does not report unready."""
        if worker.role == "frontend":
            self.mesh.balancer.remove(worker.url)
            time.sleep(IDLE_S)
        self.mesh.stop(worker)


@pytest.fixture
def servers(etcd_url: str, nats_url: str) -> tuple[str, str]:
    return etcd_url, nats_url


@contextmanager
def earlier_mesh(
    commit: str, servers: tuple[str, str], preloaded: Preloaded, home: Path
) -> Iterator[tuple[RollingMesh, TwoReleases]]:
    """Run a mesh of that commit under load."""
    tree = earlier.unpack(commit, home / "earlier")
    namespace = f"upgrade-{secrets.token_hex(3)}"
    with (
        TwoReleases(*servers, namespace, home, MODEL, ENV, preloaded, tree=tree) as processes,
        rolling_mesh(processes, STREAM_TOKENS) as mesh,
    ):
        yield mesh, processes


def commits(find: str) -> list[str]:
    """Return the commits to test, of this protocol ("same") or another one ("other")."""
    given = os.environ.get("EARLIER")
    if not given:
        return [earlier.oldest_of_this_protocol() if find == "same" else earlier.newest_of_another_protocol()]
    is_same = earlier.protocol_of(given) == earlier.protocol_of("HEAD")
    return [given] if is_same == (find == "same") else []


def protocols(processes: TwoReleases) -> set[int]:
    """Return the protocols of all records in etcd."""

    async def look() -> set[int]:
        async with join_registry(processes.etcd_url, processes.namespace, 2.0) as registry:
            return {record.protocol for role in ORDER for record in registry.book.of_role(role)}

    return asyncio.run(look())


def refused_requests(processes: TwoReleases) -> int:
    """Count refusals by draining decodes: an earlier frontend logs a move for each, although no stream had begun."""
    lines = [line for one in processes.workers if one.role == "decode" for line in one.logged().splitlines()]
    return sum('"call": "generate", "error": "Overloaded"' in line for line in lines)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_each_service_is_replaced_in_place_by_one_of_the_same_protocol(
    order: Sequence[str], servers: tuple[str, str], preloaded: Preloaded, tmp_path: Path
) -> None:
    for commit in commits("same"):
        with earlier_mesh(commit, servers, preloaded, tmp_path) as (mesh, processes):
            processes.upgrading = True
            with mesh.load.window() as seen:
                for role in order:
                    Upgrade(mesh, processes).replace(role)
                time.sleep(AFTER_S)
            print(f"\n{commit}: {seen}")  # noqa: T201 - the figures are of interest where nothing failed, too
            assert not seen.failed
            assert not seen.wrong
            assert seen.answered
            assert len(seen.moves) <= refused_requests(processes), seen.moves


def test_services_of_another_protocol_are_replaced_by_a_whole_set_beside_them(
    servers: tuple[str, str], preloaded: Preloaded, tmp_path: Path
) -> None:
    for commit in commits("other"):
        with earlier_mesh(commit, servers, preloaded, tmp_path) as (mesh, processes):
            assert protocols(processes) == {earlier.protocol_of(commit)}
            before = [worker for worker in processes.workers if worker.popen.poll() is None]
            upgrade = Upgrade(mesh, processes)
            processes.upgrading = True
            with mesh.load.window() as seen:
                for role in ("bootstrap", "prefill", "decode", "frontend"):
                    for _ in range(2):
                        mesh.start(role)
                for role in ("frontend", "decode", "prefill", "bootstrap"):
                    for worker in (one for one in before if one.role == role):
                        upgrade.stop(worker)
                time.sleep(AFTER_S)
            print(f"\n{commit}: {seen}")  # noqa: T201
            assert protocols(processes) == {PROTOCOL}
            assert not seen.failed
            assert not seen.wrong
            assert seen.answered
            assert not seen.moves
