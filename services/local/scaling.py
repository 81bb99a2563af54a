"""How many workers this box runs, told from outside: a planner's calls, answered on NATS."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Final

import nats.errors

from components.errors import BackendUnavailable, Rejected
from components.messaging.bus import connect_bus
from components.messaging.service import Endpoint, serve_calls
from components.wire.scaling import AskCounts, Counts, ScaleRole
from services.local.children import ChildSpec, Tier
from services.local.output import Output

RETRY_S: Final = 1.0
MARGIN_S: Final = 10.0  # from the end of draining to SIGKILL

MakeSpec = Callable[[str, int], ChildSpec]  # (role, number) → what to run


class Scaling:
    """The workers of both roles. Numbers go on: a worker that left leaves its name to nobody."""

    def __init__(self, tiers: Mapping[str, Tier], make_spec: MakeSpec, output: Output) -> None:
        self._tiers = tiers
        self._make_spec = make_spec
        self._output = output
        self._started = {role: len(tier.children) for role, tier in tiers.items()}

    def endpoints(self) -> list[Endpoint]:
        """What is answered."""
        return [Endpoint("count", AskCounts, self.count), Endpoint("scale", ScaleRole, self.scale)]

    async def count(self, _: AskCounts) -> Counts:
        """Workers that are kept running."""
        return Counts(prefill=len(self._tiers["prefill"].children), decode=len(self._tiers["decode"].children))

    async def scale(self, order: ScaleRole) -> Counts:
        """Start one, or have the newest finish what it has and leave. Raises: Rejected."""
        tier = self._tiers[order.role]
        here = len(tier.children)
        if order.before != here:
            raise Rejected(f"{here} {order.role} workers are kept here, not {order.before}")
        if abs(order.after - here) != 1:
            raise Rejected(f"from {here} to {order.after} {order.role} workers is not one step")
        if order.after < 1:
            raise Rejected(f"the last {order.role} worker stays")
        if not self._started[order.role]:
            raise Rejected(
                f"this mesh was started without {order.role} workers, and without what they need beside them"
            )
        if order.after > here:
            spec = self._make_spec(order.role, self._started[order.role])
            self._started[order.role] += 1
            tier.start(spec, essential=False)
            self._output.say("local", f"starting {spec.name}")
        else:
            drain_s = float(tier.children[-1].spec.env[f"MESH_{order.role.upper()}_DRAIN_TIMEOUT_S"])
            left = tier.retire_newest(drain_s + MARGIN_S)
            self._output.say("local", f"{left} finishes what it has and leaves")
        return await self.count(AskCounts())


class _Shown(logging.Handler):
    """Log records of the libraries that are used here, in the stream that everything is shown in."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Show one."""
        self._output.say("local", record.getMessage(), level=record.levelname.lower())


async def answer_scaling(scaling: Scaling, nats_url: str, namespace: str, output: Output) -> None:
    """Answer until cancelled, whatever NATS does."""
    me = token_hex(4)
    subject = f"{namespace}.local.{me}"
    logger = logging.getLogger("components")
    shown = _Shown(output)
    logger.addHandler(shown)
    try:
        while True:
            try:
                async with (
                    connect_bus(nats_url, f"local-{me}") as bus,
                    serve_calls(bus, "local", subject, scaling.endpoints(), {"instance_id": me}),
                ):
                    await asyncio.Event().wait()
            except (BackendUnavailable, nats.errors.Error, OSError) as exc:
                output.say("local", "cannot be told how many workers to run", level="warning", cause=str(exc))
                await asyncio.sleep(RETRY_S)
    finally:
        logger.removeHandler(shown)
