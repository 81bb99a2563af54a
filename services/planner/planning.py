"""The planner's loop: observes, decides, acts if this process leads, and reports."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from components.discovery.leader import Leadership
from components.errors import MeshError
from components.messaging.call_server import Endpoint
from components.planning.planner import Change, Planner, Verdict
from components.planning.samples import PLANNED, Observation, Planned
from components.wire.plans import AskPlan, PlanReported, RolePlan
from services.planner.config import PlannerSettings
from services.planner.connectors import Connector
from services.planner.fleet_sampler import FleetSampler
from services.planner.metrics import PlannerMetrics

log = logging.getLogger(__name__)

KEPT_CHANGES: Final = 10


class Planning:
    """It observes even while another planner leads, so that it knows the load when it takes over."""

    def __init__(
        self,
        settings: PlannerSettings,
        sampler: FleetSampler,
        connector: Connector | None,
        leadership: Leadership,
        metrics: PlannerMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must be the sampler's, because the times of observations and changes are compared."""
        self._clock = clock
        self._settings = settings
        self._sampler = sampler
        self._connector = connector
        self._leadership = leadership
        self._metrics = metrics
        self._planner = Planner(settings.targets(), settings.bounds(), settings.pace(), settings.devices)
        self._seen = Observation(clock(), {}, {})
        self._verdict = Verdict({}, None, "no observation yet")
        self._reported = ""  # the change last reported without a connector
        self._silent = False  # whether the connector did not answer
        self._changes: deque[str] = deque(maxlen=KEPT_CHANGES)

    async def run(self) -> None:
        while True:
            started_s = time.monotonic()
            await self.step()
            await asyncio.sleep(max(0.0, self._settings.every_s - (time.monotonic() - started_s)))

    async def step(self) -> None:
        seen = await self._sampler.observe(await self._wanted())
        if self._connector is None:
            seen = replace(seen, wanted={role: seen.serving(role) for role in PLANNED})
        verdict = self._planner.see(seen)
        leading = self._leadership.is_held()
        self._seen, self._verdict = seen, verdict
        self._metrics.show(seen, verdict, self._planner.needs, leading=leading)
        log.debug("observed", extra={"hold": verdict.hold, "unknown": len(seen.unknown), "leading": leading})
        if verdict.change is None:
            self._reported = ""
        elif self._connector is None:
            self._report(verdict.change)
        elif leading:
            await self._act(self._connector, verdict.change)

    async def _wanted(self) -> Mapping[Planned, int]:
        if self._connector is None:
            return {}
        try:
            counts = await self._connector.counts()
        except MeshError as exc:
            level = logging.DEBUG if self._silent else logging.WARNING
            log.log(level, "the connector does not answer", extra={"cause": exc.message})
            self._silent = True
            return {}
        self._silent = False
        return counts

    def _report(self, change: Change) -> None:
        text = f"{change.role} from {change.before} to {change.after}"
        if text != self._reported:
            log.info("would scale", extra=_facts(change))
            self._reported = text
            self._keep(change, "would be ")

    async def _act(self, connector: Connector, change: Change) -> None:
        try:
            await connector.scale(change)
        except MeshError as exc:
            log.warning("not scaled", extra={**_facts(change), "cause": exc.message})
            self._metrics.refused(change)
            self._planner.failed(self._clock())
            return
        log.info("scaling", extra=_facts(change))
        self._metrics.changed(change)
        self._keep(change, "")
        self._planner.took(change, self._clock())

    def _keep(self, change: Change, how: str) -> None:
        at = f"{datetime.now(UTC):%H:%M:%S}"
        self._changes.append(f"{at} {how}{change.role} {change.before} → {change.after}: {change.why}")

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("plan", AskPlan, self.plan)]

    async def plan(self, _: AskPlan) -> PlanReported:
        return PlanReported(
            leading=self._leadership.is_held(),
            connector=self._settings.connector,
            prefill=self._role("prefill"),
            decode=self._role("decode"),
            hold=self._verdict.hold,
            unknown=list(self._seen.unknown),
            changes=list(self._changes),
            most_devices=self._settings.devices,
        )

    def _role(self, role: Planned) -> RolePlan:
        bounds, need = self._settings.bounds()[role], self._verdict.needs.get(role)
        return RolePlan(
            least=bounds.least,
            most=bounds.most,
            serving=self._seen.serving(role),
            wanted=self._seen.wanted.get(role),
            needed=None if need is None else need.now,
            why="" if need is None else need.why,
            devices=self._seen.devices(role),
        )


def _facts(change: Change) -> dict[str, str | int]:
    return {"role": change.role, "before": change.before, "after": change.after, "why": change.why}
