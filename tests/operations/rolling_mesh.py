"""A mesh under load whose processes are replaced one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tests.mesh.harness import MeshProcesses, Worker
from tests.mesh.mocks import MOCK_ENV, NO_COST
from tests.mesh.outage_load import Load
from tests.operations.balancer import Balancer

STEP_S: Final = 0.04  # a stream's usual silence
STAYS_UNREADY_S: Final = 5.0  # the balancer sees it in 0.1 s, idle connections of the load end after 1 s
ENV: Final = {
    **MOCK_ENV,
    **NO_COST,
    "MESH_ENGINE__MOCK__SPEEDUP": "1",
    "MESH_ENGINE__MOCK__STEP_S": str(STEP_S),
    "MESH_LEASE_TTL_S": "2",
    "MESH_FRONTEND_UNREADY_S": str(STAYS_UNREADY_S),
}


@dataclass(slots=True)
class RollingMesh:
    processes: MeshProcesses
    load: Load
    balancer: Balancer

    def start(self, role: str, **env: str) -> Worker:
        """Return once it accepts requests."""
        worker = self.processes.start_one(role, **env)
        if role == "frontend":
            self.load.logs.append(worker.log)
            self.balancer.add(worker.url)
        return worker

    def stop(self, worker: Worker) -> None:
        """Send SIGTERM, like a supervisor; return when it has ended with 0."""
        assert worker.terminate() == 0, worker.logged()
        if worker.role == "frontend":
            self.balancer.remove(worker.url)

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.processes.workers if worker.role == role and worker.popen.poll() is None]


@contextmanager
def rolling_mesh(processes: MeshProcesses, stream_tokens: int) -> Iterator[RollingMesh]:
    """Run two of each role under load. `processes`: an empty mesh."""
    processes.modules["frontend"] = "tests.mesh.verbose_frontend"
    processes.start("bootstrap", "bootstrap", "prefill", "prefill", "decode", "decode")
    with Balancer() as balancer:
        load = Load(processes.home, balancer, (), stream_tokens)
        mesh = RollingMesh(processes, load, balancer)
        for _ in range(2):
            mesh.start("frontend")
        with load:
            load.until_calm()
            yield mesh
