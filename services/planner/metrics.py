"""Metrics of the planner."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from components.planning.needs import Needs
from components.planning.planner import Change, Verdict
from components.planning.samples import PLANNED, Observation


class PlannerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._workers = Gauge(
            "kvmesh_planner_workers",
            "Workers of a role: needed by the load, maintained by the connector (wanted), and serving.",
            ["role", "which"],
            registry=self.registry,
        )
        self._leading = Gauge("kvmesh_planner_leading", "1 if this planner leads.", registry=self.registry)
        self._unknown = Gauge(
            "kvmesh_planner_unknown", "Registered instances without heartbeats or metrics.", registry=self.registry
        )
        self._offered = Gauge("kvmesh_planner_prompt_work", "Arriving prompt work, in workers.", registry=self.registry)
        self._variability = Gauge(
            "kvmesh_planner_variability",
            "Variability of arrivals and prompt lengths; 1: random.",
            registry=self.registry,
        )
        self._changes = Counter(
            "kvmesh_planner_changes", "Workers added or removed.", ["role", "direction"], registry=self.registry
        )
        self._failures = Counter(
            "kvmesh_planner_change_failures", "Changes that the connector refused.", ["role"], registry=self.registry
        )

    def show(self, observation: Observation, verdict: Verdict, needs: Needs, *, leading: bool) -> None:
        for role in PLANNED:
            self._workers.labels(role, "serving").set(observation.serving(role))
            if observation.wanted:
                self._workers.labels(role, "wanted").set(observation.wanted[role])
            if role in verdict.needs:
                self._workers.labels(role, "needed").set(verdict.needs[role].now)
        self._leading.set(leading)
        self._unknown.set(len(observation.unknown))
        self._offered.set(needs.offered)
        self._variability.set(needs.variability)

    def changed(self, change: Change) -> None:
        self._changes.labels(change.role, "up" if change.after > change.before else "down").inc()

    def refused(self, change: Change) -> None:
        self._failures.labels(change.role).inc()
