"""What the planner shows on its own page."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from components.planning.needs import Needs
from components.planning.planner import Change, Verdict
from components.planning.samples import PLANNED, Observation


class PlannerMetrics:
    """Labels come from fixed sets only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._workers = Gauge(
            "planner_workers",
            "Workers of a role: needed by the load, wanted of the connector, serving.",
            ["role", "which"],
            registry=self.registry,
        )
        self._leading = Gauge("planner_leading", "1 where this planner acts.", registry=self.registry)
        self._unknown = Gauge("planner_unknown", "Registered instances that are not heard.", registry=self.registry)
        self._offered = Gauge("planner_prompt_work", "Prompt work that arrives, in workers.", registry=self.registry)
        self._variability = Gauge(
            "planner_variability", "Of waits, where 1 is arrivals and lengths at random.", registry=self.registry
        )
        self._changes = Counter(
            "planner_changes", "Workers ordered or let go.", ["role", "direction"], registry=self.registry
        )
        self._failures = Counter("planner_change_failures", "Changes refused.", ["role"], registry=self.registry)

    def saw(self, observation: Observation, verdict: Verdict, needs: Needs, *, leading: bool) -> None:
        """One look."""
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
        """One worker more or fewer was ordered."""
        self._changes.labels(change.role, "up" if change.after > change.before else "down").inc()

    def refused(self, change: Change) -> None:
        """The connector could not."""
        self._failures.labels(change.role).inc()
