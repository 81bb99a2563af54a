"""Connectors, which start and stop workers: their protocol, that for `services.local`, and the choice."""

from collections.abc import Mapping
from typing import Final, Protocol

from components.errors import BackendUnavailable, PeerLost
from components.messaging.bus import Bus
from components.messaging.micro_services import find_services
from components.planning.planner import Change
from components.planning.samples import Planned
from components.wire.plans import AskCounts, Counts, ScaleRole
from services.planner.compose import ComposeConnector
from services.planner.config import PlannerSettings
from services.planner.kubernetes import KubernetesConnector, Workload, in_cluster

ANSWER_S: Final = 3.0


class Connector(Protocol):
    """Keeps a number of workers of each role running. Both calls raise MeshError if they fail."""

    async def counts(self) -> Mapping[Planned, int]:
        """Return the requested number of workers of each role, started or not, without those that are stopping."""

    async def scale(self, change: Change) -> None:
        """Request a change, which may still be in progress when this returns. A worker drains before it stops."""


class LocalConnector:
    """Calls the `services.local` of our namespace over NATS."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._subject: str | None = None

    async def counts(self) -> Mapping[Planned, int]:
        counts = await self._call("count", AskCounts())
        return {"prefill": counts.prefill, "decode": counts.decode}

    async def scale(self, change: Change) -> None:
        """Raises: Rejected, if the number has changed meanwhile."""
        await self._call("scale", ScaleRole(role=change.role, before=change.before, after=change.after))

    async def _call(self, verb: str, request: AskCounts | ScaleRole) -> Counts:
        if self._subject is None:
            self._subject = await self._find()
        try:
            return await self._bus.call(f"{self._subject}.{verb}", request, Counts, timeout_s=ANSWER_S)
        except PeerLost:
            self._subject = None
            raise

    async def _find(self) -> str:
        found = await find_services(self._bus, "$SRV.PING.kvmesh-local", self._namespace)
        subjects = {one.metadata.subject for one in found}
        if len(subjects) == 1:
            return subjects.pop()
        if subjects:
            raise BackendUnavailable(
                f"{len(subjects)} services.local answer in namespace {self._namespace}: there must be one"
            )
        raise BackendUnavailable(f"no services.local answers in namespace {self._namespace}")


def open_connector(settings: PlannerSettings, bus: Bus) -> Connector | None:
    """Return None if the planner only reports decisions. Raises: WrongSettings, BackendUnavailable."""
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
                "prefill": Workload.parse(settings.kubernetes_prefill, "kubernetes_prefill"),
                "decode": Workload.parse(settings.kubernetes_decode, "kubernetes_decode"),
            }
            return KubernetesConnector(api, workloads)
