"""The output of `inspect planner`."""

import json

import pytest
from rich.console import Console

from components.messaging.call_server import Endpoint, serve_calls
from components.messaging.connection import connect_bus
from components.settings import MeshSettings
from components.wire.plans import AskPlan, PlanReported, RolePlan
from services.inspect.workers import show_plan, show_planners


def shown(plan: PlanReported) -> str:
    console = Console(width=200, record=True)
    show_plan("mesh.planner.ab12", plan, console)
    return console.export_text()


def test_a_plan_shows_the_leader_the_needs_and_the_changes() -> None:
    prefill = RolePlan(least=1, most=4, serving=2, wanted=3, needed=4, why="prompts keep 2.10 workers busy")
    plan = PlanReported(
        leading=True,
        connector="local",
        prefill=prefill,
        decode=RolePlan(least=1, most=1, serving=1),
        hold="waiting for 3 prefill workers",
        unknown=["f00"],
        changes=["10:00:00 prefill 2 → 3: prompts keep 2.10 workers busy"],
    )
    text = shown(plan)
    assert "planner ab12, connector local: leads" in text
    row = next(line for line in text.splitlines() if "1..4" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "prefill",
        "1..4",
        "2",
        "3",
        "4",
        "prompts keep 2.10 workers busy",
    ]
    unknown = next(line for line in text.splitlines() if "1..1" in line)
    assert [cell.strip() for cell in unknown.split("│")[4:6]] == ["?", "?"]
    assert "no change now: waiting for 3 prefill workers" in text
    assert "no heartbeat or metrics from: f00" in text
    assert "10:00:00 prefill 2 → 3" in text


def test_a_limit_of_devices_is_shown_with_what_a_worker_takes() -> None:
    plan = PlanReported(
        leading=True,
        connector="none",
        prefill=RolePlan(least=1, most=4, serving=2, devices=4),
        decode=RolePlan(least=1, most=1, serving=1),
        most_devices=8,
    )
    text = shown(plan)
    assert "devices each" in text
    row = next(line for line in text.splitlines() if "1..4" in line)
    assert row.split("│")[6].strip() == "4"
    assert "at most 8 devices" in text


@pytest.mark.mesh
@pytest.mark.anyio
async def test_plans_are_shown_while_etcd_is_away(
    nats_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planner does not lead then, and the output shows it."""
    role = RolePlan(least=1, most=1, serving=1)

    async def plan(_: AskPlan) -> PlanReported:
        return PlanReported(leading=False, connector="local", prefill=role, decode=role)

    settings = MeshSettings(etcd_url="http://127.0.0.1:9", nats_url=nats_url, namespace=namespace)
    endpoints, me = [Endpoint("plan", AskPlan, plan)], {"instance_id": "ab12"}
    async with (
        connect_bus(nats_url, "test") as bus,
        serve_calls(bus, "planner", f"{namespace}.planner.ab12", endpoints, me),
    ):
        await show_planners(settings, Console(width=200, color_system=None), as_json=True)
    [shown] = json.loads(capsys.readouterr().out)
    assert (shown["instance"], shown["leading"]) == ("ab12", False)
