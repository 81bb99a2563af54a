"""What starts and stops workers: the part of a connector that the planner calls, and how one is chosen."""

from collections.abc import Mapping
from typing import Protocol

from components.messaging.bus import Bus
from components.planning.planner import Change
from components.planning.samples import Planned
from services.planner.compose import ComposeConnector
from services.planner.config import PlannerSettings
from services.planner.kubernetes import KubernetesConnector, Workload, in_cluster
from services.planner.local import LocalConnector


class Connector(Protocol):
    """Keeps a number of workers of each role. Both calls raise MeshError when they cannot."""

    async def counts(self) -> Mapping[Planned, int]:
        """Workers that are kept, started or not; none that is on its way out."""

    async def scale(self, change: Change) -> None:
        """Order the change; it need not have happened when this returns. A worker that goes drains before it stops."""


def open_connector(settings: PlannerSettings, bus: Bus) -> Connector | None:
    """The one of the settings; None where the planner only says what it would do. Raises: BackendUnavailable."""
    match settings.connector:
        case "none":
            return None
        case "local":
            return LocalConnector(bus, settings.namespace)
        case "compose":
            return ComposeConnector(settings.compose_command, settings.compose_file, settings.compose_project)
        case "kubernetes":
            api = in_cluster(settings.kubernetes_api, settings.kubernetes_namespace)
            workloads: dict[Planned, Workload] = {
                "prefill": Workload.parse(settings.kubernetes_prefill),
                "decode": Workload.parse(settings.kubernetes_decode),
            }
            return KubernetesConnector(api, workloads)
