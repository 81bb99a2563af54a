"""Answer a planner's calls on NATS: the number of workers on this machine, one more, one fewer."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import nats.errors

from components.errors import BackendUnavailable, Rejected
from components.messaging.call_server import Endpoint, serve_calls
from components.messaging.connection import connect_bus
from components.settings import MeshSettings
from components.wire.plans import AskCounts, Counts, KillWorker, ScaleRole, WorkerKilled
from services.local.children import ChildSpec, Tier
from services.local.output import Output

RETRY_S: Final = 1.0
KILLED: Final = ("prefill", "decode")  # roles that `kill` takes
MARGIN_S: Final = 10.0  # from the end of draining to SIGKILL

MakeSpec = Callable[[str, int, Mapping[str, int]], ChildSpec]  # (role, number, processes of each role) → what to run


class Scaling:
    """The workers of both roles. The name of a stopped worker is not reused."""

    def __init__(self, tiers: Mapping[str, Tier], make_spec: MakeSpec, output: Output) -> None:
        self._tiers = tiers
        self._make_spec = make_spec
        self._output = output
        self._started = {role: len(tier.children) for role, tier in tiers.items()}

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("count", AskCounts, self.count),
            Endpoint("scale", ScaleRole, self.scale),
            Endpoint("kill", KillWorker, self.kill),
        ]

    async def count(self, _: AskCounts) -> Counts:
        return Counts(prefill=len(self._tiers["prefill"].children), decode=len(self._tiers["decode"].children))

    async def scale(self, order: ScaleRole) -> Counts:
        """Start a worker, or let the newest one finish its requests and stop. Raises: Rejected."""
        tier = self._tiers[order.role]
        here = len(tier.children)
        if order.before != here:
            raise Rejected(f"{here} {order.role} workers run here, not {order.before}")
        if abs(order.after - here) != 1:
            raise Rejected(f"from {here} to {order.after} {order.role} workers is not a change by one")
        if order.after < 1:
            raise Rejected(f"the last {order.role} worker cannot be stopped")
        if not self._started[order.role]:
            raise Rejected(f"this mesh was started without {order.role} workers; start it with one")
        if order.after > here:
            counts = {role: len(tier.children) for role, tier in self._tiers.items()} | {order.role: order.after}
            spec = self._make_spec(order.role, self._started[order.role], counts)
            self._started[order.role] += 1
            tier.start(spec, essential=False)
            self._output.report("local", f"starting {spec.name}")
        else:
            drain_s = float(tier.children[-1].spec.env[f"MESH_{order.role.upper()}_DRAIN_TIMEOUT_S"])
            left = tier.retire_newest(drain_s + MARGIN_S)
            self._output.report("local", f"stopping {left} after its requests")
        return await self.count(AskCounts())

    async def kill(self, order: KillWorker) -> WorkerKilled:
        """Kill a worker, which is then started again as after any death. Raises: Rejected."""
        for child in (child for role in KILLED for child in self._tiers[role]):
            if child.instance_id == order.instance_id and child.kill():
                self._output.report("local", f"killed {child.spec.name}, as asked at /ui", level="warning")
                return WorkerKilled(name=child.spec.name)
        raise Rejected(f"no worker {order.instance_id[:40]!r} runs here: it has just ended, or another machine runs it")


class _Shown(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.report("local", record.getMessage(), level=record.levelname.lower())


async def answer_scaling(scaling: Scaling, settings: MeshSettings, subject: str, output: Output) -> None:
    """Answer calls until cancelled; reconnect whenever NATS fails."""
    me = subject.rpartition(".")[2]
    logger = logging.getLogger("components")
    shown = _Shown(output)
    logger.addHandler(shown)
    try:
        while True:
            try:
                async with (
                    connect_bus(settings.nats_url, f"local-{me}", settings.nats_access("local")) as bus,
                    serve_calls(bus, "local", subject, scaling.endpoints(), {"instance_id": me}),
                ):
                    await asyncio.Event().wait()
            except (BackendUnavailable, nats.errors.Error, OSError) as exc:
                output.report("local", "cannot receive a planner's calls", level="warning", cause=str(exc))
                await asyncio.sleep(RETRY_S)
    finally:
        logger.removeHandler(shown)
