"""What a planner thinks, and what it did last."""

import asyncio
import json
from collections.abc import Sequence

from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from components.errors import MeshError
from components.local_mesh import no_answer_advice
from components.messaging.bus import Bus, connect_bus
from components.settings import MeshSettings
from components.urls import without_password
from components.wire.plan import AskPlan, PlanTold, RolePlan

LISTEN_S = 0.5
ANSWER_S = 3.0


async def show_planner(settings: MeshSettings, console: Console) -> None:
    """Print a table for each planner of the namespace. Exits with a sentence when there is none."""
    try:
        async with asyncio.timeout(8), connect_bus(settings.nats_url, "inspect") as bus:
            subjects = await _planners(bus, settings.namespace)
            told = [(s, await bus.call(f"{s}.plan", AskPlan(), PlanTold, timeout_s=ANSWER_S)) for s in subjects]
    except TimeoutError:
        raise SystemExit(
            f"no answer from NATS at {without_password(settings.nats_url)}: {no_answer_advice(settings)}"
        ) from None
    except MeshError as exc:
        raise SystemExit(exc.message) from None
    if not told:
        raise SystemExit(f"no planner answers in namespace {settings.namespace}: python -m services.planner starts one")
    for subject, plan in told:
        show_plan(subject, plan, console)


def show_plan(subject: str, plan: PlanTold, console: Console) -> None:
    """One planner's table."""
    state = "leads" if plan.leading else "waits: another one leads, or etcd is away"
    table = Table(
        title=f"planner {subject.rpartition('.')[2]}, connector {plan.connector}: {state}", title_justify="left"
    )
    for name in ("role", "least..most", "serving", "wanted", "needed", "why"):
        table.add_column(name)
    for role, one in (("prefill", plan.prefill), ("decode", plan.decode)):
        table.add_row(role, f"{one.least}..{one.most}", str(one.serving), *_numbers(one), one.why)
    console.print(table)
    if plan.hold:
        console.print(f"nothing is changed: {plan.hold}")
    if plan.unknown:
        console.print(f"[yellow]not heard: {' '.join(plan.unknown)}")
    for change in plan.changes:
        console.print(change)


def _numbers(one: RolePlan) -> Sequence[str]:
    return ["?" if number is None else str(number) for number in (one.wanted, one.needed)]


async def _planners(bus: Bus, namespace: str) -> list[str]:
    subjects: set[str] = set()

    async def receive(message: Msg) -> None:
        if message.data:  # else NATS itself: nobody is there
            subject = (json.loads(message.data).get("metadata") or {}).get("subject", "")
            if subject.startswith(f"{namespace}.planner."):
                subjects.add(subject)

    inbox = bus.client.new_inbox()
    async with bus.subscription(inbox, receive):
        await bus.client.publish("$SRV.PING.kvmesh-planner", reply=inbox)
        await asyncio.sleep(LISTEN_S)
    return sorted(subjects)
