"""make upgrade-test: each member of an etcd and of a NATS cluster is restarted in turn, as for an upgrade, under load."""

import signal
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.mesh.clusters import EtcdCluster, Member, NatsCluster, ServerCluster
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MODEL
from tests.mesh.preloaded import Preloaded
from tests.operations.rolling_mesh import ENV, RollingMesh, rolling_mesh
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.upgrades]

STREAM_TOKENS: Final = 60
AFTER_S: Final = 2.0


@pytest.fixture
def clusters(
    preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RollingMesh, list[ServerCluster]]]:
    home = tmp_path_factory.mktemp("clusters")
    env = {**ENV, "MESH_FRONTEND_MAX_STORED_RESPONSES": "0"}
    with (
        EtcdCluster(home) as etcd,
        NatsCluster(home) as nats,
        MeshProcesses(etcd.url, nats.url, "restarts", home, MODEL, env, preloaded) as processes,
        rolling_mesh(processes, STREAM_TOKENS) as mesh,
    ):
        yield mesh, [etcd, nats]


def end(member: Member) -> None:
    """Send SIGTERM, and reap it."""
    assert member.popen is not None
    member.popen.send_signal(signal.SIGTERM)
    member.popen.wait(PATIENCE_S)


def test_no_request_fails_while_each_member_of_etcd_and_nats_is_restarted(
    clusters: tuple[RollingMesh, list[ServerCluster]],
) -> None:
    mesh, servers = clusters
    for cluster in servers:
        mesh.load.until_calm()
        with mesh.load.window() as seen:
            for member in cluster.members:
                end(member)
                time.sleep(AFTER_S)
                cluster.start()
                time.sleep(AFTER_S)
        print(f"\n{cluster.kind.name}: {seen}")  # noqa: T201 - the figures are of interest where nothing failed, too
        assert not seen.failed
        assert not seen.wrong
        assert seen.answered
        assert seen.stream_events
