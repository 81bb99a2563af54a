"""Every service is restarted in turn while requests and streams run: no request fails, no token is lost or doubled."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from bench.processes import free_port
from tests.mesh.harness import MeshProcesses
from tests.mesh.outage_load import Window
from tests.mesh.preloaded import Preloaded
from tests.operations.rolling_mesh import ENV, RollingMesh, rolling_mesh

pytestmark = pytest.mark.mesh

STREAM_TOKENS: Final = 60  # 2.4 s
AFTER_S: Final = 1.0  # effects just after a restart count
SHORTER_THAN_STREAMS_S: Final = "0.2"
OF_SILENCE: Final = ("silent for ", "its engine has made no step")  # causes of moves that a busy machine makes, too
LEASE_S: Final = "10"  # a stalled process keeps its lease; one that ends revokes it


@pytest.fixture(scope="module")
def mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RollingMesh]:
    """A mesh with a planner and an observer, for all restarts."""
    home = tmp_path_factory.mktemp("rolling")
    port = free_port()
    env = {
        **ENV,
        "MESH_LEASE_TTL_S": LEASE_S,
        "MESH_OBSERVER_PORT": str(port),
        "MESH_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
    }
    namespace = f"rolling-{secrets.token_hex(3)}"
    with MeshProcesses(etcd_url, nats_url, namespace, home, "mock", env, preloaded) as processes:
        processes.start("observer", "planner")
        with rolling_mesh(processes, STREAM_TOKENS) as under_load:
            yield under_load


@contextmanager
def restart_of_all(mesh: RollingMesh, role: str, **env: str) -> Iterator[Window]:
    """Restart all of a role, then yield. The window is complete after the context."""
    mesh.load.until_calm()
    with mesh.load.window() as seen:
        for worker in mesh.of_role(role):
            mesh.stop(worker)
            mesh.start(role, **env)
        time.sleep(AFTER_S)
        yield seen
    print(f"\n{role}: {seen}")  # noqa: T201 - the figures are of interest where nothing failed, too
    assert not seen.failed
    assert not seen.wrong
    assert seen.answered
    assert seen.stream_events


@pytest.mark.parametrize("role", ["observer", "planner", "bootstrap", "prefill", "decode", "frontend"])
def test_no_request_fails_and_no_stream_moves_while_each_is_restarted(role: str, mesh: RollingMesh) -> None:
    with restart_of_all(mesh, role) as seen:
        pass
    assert not [cause for cause in seen.moves if not cause.startswith(OF_SILENCE)]


def test_streams_that_outlast_the_drain_of_their_decode_move_and_lose_no_token(mesh: RollingMesh) -> None:
    with restart_of_all(mesh, "decode", MESH_DECODE_DRAIN_TIMEOUT_S=SHORTER_THAN_STREAMS_S):
        pass
    with restart_of_all(mesh, "decode") as seen:
        pass
    assert seen.moves
