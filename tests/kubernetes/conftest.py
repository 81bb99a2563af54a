"""One Kubernetes for the run, with etcd and NATS in it."""

import json
from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import Cluster, require_all, running_cluster
from tests.kubernetes.servers import servers


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_all()
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        for part in servers():
            running.kubectl("apply", "-f", "-", stdin=json.dumps(part))
        for name in ("etcd", "nats"):
            running.kubectl("rollout", "status", f"deployment/{name}", "--timeout=90s", timeout_s=100)
        yield running
