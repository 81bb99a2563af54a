"""docker-compose.cluster.yml under load, with mock engines: members and workers are killed, and every service is upgraded."""

import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, Final

import httpx
import pytest

from tests.compose.balancer import Balancer
from tests.compose.docker_engine import DockerEngine
from tests.compose.project import Build, Project, project
from tests.mesh.outage_load import Load, Window
from tests.mesh.outage_mesh import ENV
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

STREAM_TOKENS: Final = 300  # 12 s; a stopping frontend serves for 35 s, enough for two on one connection
AFTER_S: Final = 4.0
SERVED: Final = ("bootstrap", "prefill", "decode")
ENGINE: Final = {name: value for name, value in ENV.items() if name.startswith("MESH_ENGINE")}
STORES_NONE: Final = "MESH_FRONTEND_MAX_STORED_RESPONSES"
FRONTEND: Final = {
    name: value for name, value in ENV.items() if name.startswith("MESH_FRONTEND") and name != STORES_NONE
}
DECODE: Final = {name: value for name, value in ENV.items() if name.startswith("MESH_DECODE")}


@pytest.fixture(scope="module")
def cluster(engine: DockerEngine, build: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    home = tmp_path_factory.mktemp("cluster")
    settings = {"prefill": ENGINE, "decode": ENGINE | DECODE, "frontend": FRONTEND}
    files = ["docker-compose.yml", "docker-compose.cluster.yml"]
    # Two frontends take a port each of the range; the upgrade needs as many again.
    env = {"MESH_MODEL": "mock", "MESH_FRONTEND_PORT": "18200-18205"}
    with project(engine, build, home, "kvmesh-test-cluster", files, env, settings) as running:
        running.up("--scale", "frontend=2")
        yield running


@pytest.fixture(scope="module")
def balancer(cluster: Project) -> Iterator[Balancer]:
    with Balancer(lambda: cluster.addresses("frontend")) as running:
        yield running


@pytest.fixture(scope="module")
def load(cluster: Project, balancer: Balancer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    assert len(balancer.addresses) == 2
    with Load(tmp_path_factory.mktemp("load"), repeat(balancer.url), [], STREAM_TOKENS) as under:
        yield under


def seen_while(load: Load, cluster: Project, happens: Callable[[], object]) -> Window:
    load.until_calm()
    with load.window() as seen:
        happens()
        time.sleep(AFTER_S)
    print(f"\n{seen}")  # noqa: T201
    assert seen.failed == [], cluster.logs("frontend", "decode")
    assert seen.wrong == []
    assert seen.answered
    load.until_calm()
    return seen


def test_every_member_and_every_service_twice(cluster: Project) -> None:
    members = cluster.compose("exec", "-T", "etcd", "etcdctl", "member", "list")
    assert members.count("started") == 3
    for service in (*SERVED, "frontend"):
        assert len(cluster.containers(service)) == 2, service
    routes = cluster.compose("exec", "-T", "nats-2", "wget", "-q", "-O", "-", "http://127.0.0.1:8222/routez")
    assert '"remote_name": "nats"' in routes
    assert '"remote_name": "nats-3"' in routes


@pytest.mark.parametrize("member", ["etcd", "nats", "etcd-3", "nats-2"])
def test_a_killed_member_costs_no_request(member: str, cluster: Project, load: Load) -> None:
    seen_while(load, cluster, lambda: cluster.engine.docker("kill", *cluster.containers(member)))
    seen_while(load, cluster, lambda: cluster.up("--no-recreate", "--no-deps", member))


def test_responses_are_read_and_stored_while_any_one_nats_member_is_down(cluster: Project, balancer: Balancer) -> None:
    def answered(path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        call = httpx.post if body else httpx.get
        extra = {"json": body} if body else {}
        found = call(f"{balancer.url}/v1/responses{path}", timeout=PATIENCE_S, **extra)
        assert found.status_code == 200, found.text
        return dict(found.json())

    ids = [answered("", {"model": "mock", "input": "Hello", "max_output_tokens": 4})["id"]]
    for member in ("nats", "nats-2", "nats-3"):
        cluster.engine.docker("kill", *cluster.containers(member))
        made = answered("", {"model": "mock", "input": "Hello", "max_output_tokens": 4})
        ids.append(made["id"])
        assert made["store"], cluster.logs("frontend")
        assert [answered(f"/{one}")["id"] for one in ids] == ids
        cluster.up("--no-recreate", "--no-deps", member)


@pytest.mark.parametrize("service", SERVED)
def test_a_killed_container_costs_no_request(service: str, cluster: Project, load: Load) -> None:
    seen_while(load, cluster, lambda: cluster.engine.docker("kill", cluster.containers(service)[0]))
    seen_while(load, cluster, lambda: cluster.up("--no-recreate", "--no-deps", "--scale", f"{service}=2", service))
    assert len(cluster.containers(service)) == 2


@pytest.mark.parametrize("service", [*SERVED, "frontend"])
def test_an_upgrade_costs_no_request(service: str, cluster: Project, load: Load) -> None:
    """Clients of frontends keep their connections to them."""
    before = set(cluster.containers(service))
    seen_while(load, cluster, lambda: cluster.upgrade(service))
    after = set(cluster.containers(service))
    assert len(after) == 2
    assert not after & before


def test_an_upgrade_one_by_one_costs_no_request(cluster: Project, load: Load) -> None:
    """Like workers with a GPU each."""
    before = set(cluster.containers("decode"))
    seen_while(load, cluster, lambda: cluster.upgrade("--one-by-one", "decode"))
    assert not before & set(cluster.containers("decode"))


@pytest.mark.parametrize("members", [("etcd", "etcd-2", "etcd-3"), ("nats", "nats-2", "nats-3")], ids=str)
def test_an_upgrade_of_the_members_one_by_one_costs_no_request(
    members: tuple[str, ...], cluster: Project, load: Load
) -> None:
    seen_while(load, cluster, lambda: cluster.upgrade("--one-by-one", *members))
