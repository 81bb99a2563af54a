"""One Kubernetes for the run, with etcd and NATS in it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kubernetes.cluster import Cluster, require_all, running_cluster
from tests.kubernetes.servers import start_servers

HELD: Final = "KUBERNETES_TEST_CLUSTER"  # the folder of a cluster that tests.kubernetes.hold keeps


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_all()
    if folder := os.environ.get(HELD):
        held = Cluster(Path(folder), int(Path(folder, "init").read_text()))
        held.import_images()  # the sources of now
        yield held
        return
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        start_servers(running)
        yield running
