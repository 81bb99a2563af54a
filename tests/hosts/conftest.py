"""One mesh on six hosts for the module that asks; the tests run on the host `client`."""

from collections.abc import Iterator
from typing import Final

import pytest

from components.permissions import ADMINISTRATOR
from tests.hosts.hosts import Hosts, cannot_run
from tests.hosts.mesh import ETCD_PORT, NAMES, NATS_PORT, PASSWORD, HostMesh, servers
from tests.mesh.outage_mesh import ENV

NAMESPACE: Final = "outages"


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    if why := cannot_run():
        pytest.fail(f"these tests cannot run here: {why}")
    with Hosts(NAMES).running() as running, running["client"].inside():
        yield running


@pytest.fixture(scope="session")
def server_urls(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Of etcd and NATS, on the host `core`."""
    core = hosts["core"]
    with servers(core, tmp_path_factory.mktemp("core")):
        yield f"http://{core.address}:{ETCD_PORT}", f"nats://{ADMINISTRATOR}:{PASSWORD}@{core.address}:{NATS_PORT}"


@pytest.fixture(scope="session")
def host_mesh(
    hosts: Hosts, server_urls: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostMesh]:
    home = tmp_path_factory.mktemp("hosts")
    etcd_url, nats_url = server_urls
    with HostMesh(etcd_url, nats_url, NAMESPACE, home, "mock", ENV, hosts=hosts) as mesh:
        mesh.modules["frontend"] = "tests.mesh.verbose_frontend"
        mesh.start_on("core", "bootstrap")
        mesh.start_on("prefill", "prefill")
        mesh.start_on("decode", "decode")
        mesh.start_on("decode2", "decode")
        mesh.start_on("frontend", "frontend")
        yield mesh
