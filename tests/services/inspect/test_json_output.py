"""The output of `--json`, which every command has."""

import json
import math

import typer

from components.messaging.micro_services import CallStats, EndpointStats, MicroService
from components.wire.heartbeat import Heartbeat
from components.wire.inspection import Candidate, RouteExplained
from components.wire.plans import PlanReported, RolePlan
from services.inspect import __main__ as inspect
from services.inspect import route, workers
from tests.services.inspect.meshes import seen, with_ranks


def test_every_command_has_json() -> None:
    commands = typer.main.get_command(inspect.app).commands  # type: ignore[attr-defined]
    assert len(commands) > 10
    without = {name for name, one in commands.items() if "--json" not in {o for p in one.params for o in p.opts}}
    assert without == set()


def test_workers_are_objects_with_the_record_the_load_and_the_calls() -> None:
    decode, frontend = (seen(role).record for role in ("decode", "frontend"))
    prefill = with_ranks(seen("prefill"), "cuda:0", "cuda:1").record
    assert decode is not None
    assert prefill is not None
    assert frontend is not None
    beat = Heartbeat(instance_id="d1", epoch="e", step=1, busy=True, draining=True, num_running=3, total_pages=10)
    service = MicroService("kvmesh-decode", endpoints=(EndpointStats("generate", 7, CallStats(2)),))
    answers = {("decode", "d1"): service, ("prefill", "p1"): service, ("decode", "x9"): service}
    beats = {("decode", "d1"): beat}
    shown = json.loads(json.dumps(workers.as_fields([decode, prefill, frontend], beats, answers, "mesh")))
    assert (shown["namespace"], shown["not_in_etcd"]) == ("mesh", ["x9"])
    of = {one["instance_id"]: one for one in shown["instances"]}
    assert {name: one["state"] for name, one in of.items()} == {"d1": "draining", "p1": "silent", "f1": "no answer"}
    assert (of["d1"]["load"]["num_running"], of["d1"]["calls"], of["d1"]["errors"]) == (3, {"generate": 7}, 2)
    assert (of["p1"]["load"], of["f1"]["calls"], of["f1"]["kv"]) == (None, None, None)
    assert of["p1"]["kv"].keys() == {"backend", "device", "layout"}, "no addresses for peers"
    assert of["p1"]["ranks"] == [{"device": "cuda:0", "pid": 1}, {"device": "cuda:1", "pid": 101}]


def test_a_worker_that_drained_is_shown_as_in_top() -> None:
    """It stayed `draining` until its end."""
    record = seen("decode").record
    assert record is not None
    beat = Heartbeat(instance_id="d1", epoch="e", step=1, busy=False, draining=True, total_pages=10)
    answers = {("decode", "d1"): MicroService("kvmesh-decode")}
    (shown,) = workers.as_fields([record], {("decode", "d1"): beat}, answers, "mesh")["instances"]
    assert shown["state"] == "drained"


def test_a_plan_has_all_its_fields_also_those_that_are_unknown() -> None:
    plan = PlanReported(
        leading=True,
        connector="local",
        prefill=RolePlan(least=1, most=4, serving=2, wanted=3, needed=4, why="busy"),
        decode=RolePlan(least=1, most=1, serving=1),
    )
    shown = json.loads(json.dumps(workers.plan_fields("mesh.planner.ab12", plan)))
    assert (shown["instance"], shown["leading"], shown["hold"], shown["changes"]) == ("ab12", True, "", [])
    assert (shown["prefill"]["needed"], shown["decode"]["needed"]) == (4, None)


def test_a_route_is_json_also_with_an_instance_that_is_too_full() -> None:
    """JSON has no infinity, but Python would write one."""
    candidates = [
        Candidate(
            instance_id=name, cached_tokens=0, queued_tokens=0, running=0, used_pages=1, total_pages=2, breaker="closed",
            cost=cost,
        )
        for name, cost in (("p1", 2.5), ("p2", math.inf))
    ]  # fmt: skip
    frontend, decode = seen("frontend").record, seen("decode").record
    assert frontend is not None
    assert decode is not None
    choices = [
        route.Choice(frontend, RouteExplained(policy="a", token_ids=b"\1\0\0\0", why="least", chosen="d1")),
        route.Choice(
            decode, RouteExplained(policy="b", token_ids=b"\1\0\0\0", why="few tokens", candidates=candidates)
        ),
    ]
    text = json.dumps(route.as_fields(choices), allow_nan=False)
    shown = json.loads(text)
    assert shown["tokens"] == 1
    first, second = shown["choices"]
    assert (first["role"], first["instance"], first["chosen"], first["why"]) == ("frontend", "f1", "d1", "least")
    assert (second["chosen"], [one["cost"] for one in second["candidates"]]) == (None, [2.5, None])
