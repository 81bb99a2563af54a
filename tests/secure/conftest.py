"""A mesh of real processes with its own etcd and NATS, and a certificate for each role."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.local.accounts import Accounts, Backends
from services.local.servers import ETCD, NATS, running
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.preloaded import Preloaded

FRONTENDS = 4


@pytest.fixture
def mock_mesh(preloaded: Preloaded, namespace: str, tmp_path: Path) -> Iterator[MeshProcesses]:
    """Like that of tests/mesh; no process may have been refused anything."""
    accounts = Accounts.make(namespace, FRONTENDS, tmp_path / "tls")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        etcd, nats = (
            runner.run(stack.enter_async_context(running(kind, tmp_path / "servers", accounts=accounts)))
            for kind in (ETCD, NATS)
        )
        try:
            reach = lambda user: Backends(etcd.url, nats.url, user, accounts.certificates[user])  # noqa: E731
            with MeshProcesses(
                etcd.url, nats.url, namespace, tmp_path, "mock", MOCK_ENV, preloaded, reach=reach
            ) as mesh:
                yield mesh
                said = nats.log_file.read_text() + "".join(worker.logged() for worker in mesh.workers)
            assert [
                line for line in said.splitlines() if "violation" in line.lower() or "permission denied" in line
            ] == []
        finally:
            runner.run(stack.aclose())
