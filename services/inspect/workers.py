"""Shows instances and planners of a mesh: records in etcd and answers over NATS."""

import asyncio
import json
import time
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.messaging.heartbeat_query import HeartbeatQuery
from components.messaging.micro_services import MicroService, find_services
from components.settings import MeshSettings
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from components.wire.plans import AskPlan, PlanReported
from services.inspect.columns import age, columns
from services.inspect.mesh import WORKERS, Mesh, has_requests, open_bus, open_mesh, planners

T = TypeVar("T")
Key = tuple[str, str]  # role and instance id, which is unique in its role only

ANSWER_S: Final = 3.0
NOT_IN_ETCD: Final = ("kvmesh-planner", "kvmesh-local")  # they answer on NATS, but serve no requests
# Fields of a heartbeat.
LOAD: Final = (
    "num_running",
    "num_waiting",
    "num_held",
    "total_pages",
    "free_pages",
    "cached_pages",
    "held_pages",
    "draining",
)


async def show_workers(settings: MeshSettings, console: Console, *, wide: bool = False, as_json: bool = False) -> None:
    async with open_mesh(settings) as mesh:
        asked = mesh.records()
        calls = [HeartbeatQuery(mesh.bus, mesh.namespace, role, mesh.book).answers() for role in WORKERS]
        answers, found = await asyncio.gather(asyncio.gather(*calls), _services(mesh, asked))
        records, services = unchanged(asked, mesh.records(), found)
    beats: dict[Key, Heartbeat] = {
        (role, name): beat
        for role, of_role in zip(WORKERS, answers, strict=True)
        for name, beat in of_role.beats.items()
    }
    if as_json:
        console.out(json.dumps(as_fields(records, beats, services, settings.namespace)), highlight=False)
        return
    console.print(summary(records, settings.namespace), "", load_table(records, beats, services, wide=wide), sep="\n")
    console.print("", address_table(records), sep="\n")
    for role, instance_id in unregistered(records, services):
        console.print(f"[yellow]answers on NATS but is not in etcd: kvmesh-{role} {instance_id}")


def unchanged(
    asked: Collection[InstanceRecord], now: Collection[InstanceRecord], services: Mapping[Key, T]
) -> tuple[list[InstanceRecord], dict[Key, T]]:
    """Leave out instances that registered or left during the query, because they may not have received it.

    Args:
        services: answers.
    Returns: the records and the answers to show, including answers of instances without a record.
    """
    known = {(*_key(record), record.epoch) for record in asked}
    records = [record for record in now if (*_key(record), record.epoch) in known]
    changed = {_key(record) for record in (*asked, *now)} - {_key(record) for record in records}
    return records, {name: answer for name, answer in services.items() if name not in changed}


def _key(record: InstanceRecord) -> Key:
    return record.role, record.instance_id


async def _services(mesh: Mesh, asked: Collection[InstanceRecord]) -> dict[Key, MicroService]:
    found = await find_services(mesh.bus, "$SRV.STATS", mesh.namespace, [record.subject for record in asked])
    return {
        (one.name.removeprefix("kvmesh-"), one.metadata.instance_id): one
        for one in found
        if one.name not in NOT_IN_ETCD and one.metadata.instance_id
    }


def unregistered(records: list[InstanceRecord], services: Collection[Key]) -> list[Key]:
    return sorted(set(services) - {_key(record) for record in records})


def as_fields(
    records: list[InstanceRecord], beats: Mapping[Key, Heartbeat], services: Mapping[Key, MicroService], namespace: str
) -> dict[str, Any]:
    instances = []
    for record in records:
        beat, service = beats.get(_key(record)), services.get(_key(record))
        facts = {name: msgspec.to_builtins(value) for name, value in asdict(record).items()}
        if (kv := record.kv) is not None:  # without its addresses, which are for peers
            facts["kv"] = {"backend": kv.backend, "device": kv.device, "layout": kv.layout.text}
            facts["ranks"] = [
                {"device": device, "pid": pid} for device, pid in zip(kv.devices, _pids(record), strict=True)
            ]
        facts["state"] = Text.from_markup(_state(record, beat, service)).plain
        facts["load"] = None if beat is None else {name: getattr(beat, name) for name in LOAD}
        facts["calls"] = None if service is None else {e.name: e.num_requests for e in service.endpoints}
        facts["errors"] = None if service is None else service.num_errors
        instances.append(facts)
    return {
        "namespace": namespace,
        "instances": instances,
        "not_in_etcd": [name for _, name in unregistered(records, services)],
    }


def summary(records: list[InstanceRecord], namespace: str) -> str:
    models = sorted({name for record in records for name in (record.model, *record.adapters) if name})
    return f"namespace {namespace}: {len(records)} instances" + (f" of {', '.join(models)}" if models else "")


def load_table(
    records: list[InstanceRecord], beats: Mapping[Key, Heartbeat], services: Mapping[Key, MicroService], *, wide: bool
) -> Table:
    """`wide` needs about 150 columns."""
    more = ("epoch", "host", "model", "pages free/cached/held", "step", "calls by NATS") if wide else ()
    names = ("role", "instance", ">pid", ">up", "state", ">run", ">wait", ">held", ">pages", ">errors", *more)
    table = columns(*names, gap=1)
    for record in records:
        beat, service = beats.get(_key(record)), services.get(_key(record))
        table.add_row(*_row(record, beat, service), *(_more(record, beat, service) if wide else ()))
    return table


def address_table(records: list[InstanceRecord]) -> Table:
    table = columns("role", "instance", "devices", "serves clients at", "metrics and health at", folds=True)
    for record in records:
        is_frontend = record.role == "frontend"
        page = record.metrics if is_frontend else record.http
        devices = "" if record.kv is None else " ".join(record.kv.devices)
        clients = (record.http or "") if is_frontend else ""
        table.add_row(record.role, record.instance_id, devices, clients, page or "")
    return table


def _pids(record: InstanceRecord) -> list[int]:
    """Return the process ids of all ranks, in order."""
    return [record.pid, *(rank.pid for rank in ([] if record.kv is None else record.kv.followers))]


def _row(record: InstanceRecord, beat: Heartbeat | None, service: MicroService | None) -> list[str]:
    up_s = time.time() - record.started_unix_ms / 1000
    errors = "" if service is None else str(service.num_errors)
    about = [record.role, record.instance_id, str(record.pid), age(up_s), _state(record, beat, service)]
    if beat is None:
        return [*about, "", "", "", "", errors]
    used = beat.total_pages - beat.free_pages - beat.cached_pages
    counts = [str(count) for count in (beat.num_running, beat.num_waiting, beat.num_held)]
    return [*about, *counts, f"{100 * used / max(1, beat.total_pages):.0f} % of {beat.total_pages}", errors]


def _state(record: InstanceRecord, beat: Heartbeat | None, service: MicroService | None) -> str:
    if service is None:
        return "[red]no answer"
    if beat is None and record.kv is not None:
        return "[red]silent"
    if beat is None or not beat.draining:
        return "ok"
    return "draining" if has_requests(beat) else "drained"


def _more(record: InstanceRecord, beat: Heartbeat | None, service: MicroService | None) -> list[str]:
    pages = "" if beat is None else f"{beat.free_pages}/{beat.cached_pages}/{beat.held_pages}"
    endpoints = () if service is None else service.endpoints
    calls = " ".join(f"{e.name}:{e.num_requests}" for e in endpoints if e.num_requests)
    step = f"{record.max_running} x {record.max_step_tokens}" if record.max_running else ""
    return [record.epoch, record.host, " ".join([record.model or "", *record.adapters]), pages, step, calls]


async def show_planners(settings: MeshSettings, console: Console, *, as_json: bool) -> None:
    async with open_bus(settings) as bus:  # it works without etcd
        subjects = sorted((await planners(bus, settings.namespace)).values())
        plans = [(s, await bus.call(f"{s}.plan", AskPlan(), PlanReported, timeout_s=ANSWER_S)) for s in subjects]
    if not plans:
        raise SystemExit(f"no planner answers in namespace {settings.namespace}: python -m services.planner starts one")
    if as_json:
        console.out(json.dumps([plan_fields(subject, plan) for subject, plan in plans]), highlight=False)
        return
    for subject, plan in plans:
        show_plan(subject, plan, console)


def plan_fields(subject: str, plan: PlanReported) -> dict[str, Any]:
    roles = {"prefill": asdict(plan.prefill), "decode": asdict(plan.decode)}
    return {"instance": subject.rpartition(".")[2], **asdict(plan), **roles}


def show_plan(subject: str, plan: PlanReported, console: Console) -> None:
    state = "leads" if plan.leading else "does not lead: another planner does, or etcd is unreachable"
    table = Table(
        title=f"planner {subject.rpartition('.')[2]}, connector {plan.connector}: {state}", title_justify="left"
    )
    roles = (("prefill", plan.prefill), ("decode", plan.decode))
    by_device = plan.most_devices is not None or any(one.devices > 1 for _, one in roles)
    for name in ("role", "min..max", "serving", "wanted", "needed", *(["devices each"] if by_device else []), "why"):
        table.add_column(name)
    for role, one in roles:
        numbers = ["?" if number is None else str(number) for number in (one.wanted, one.needed)]
        devices = [str(one.devices)] if by_device else []
        table.add_row(role, f"{one.least}..{one.most}", str(one.serving), *numbers, *devices, one.why)
    console.print(table)
    if plan.most_devices is not None:
        console.print(f"at most {plan.most_devices} devices")
    if plan.hold:
        console.print(f"no change now: {plan.hold}")
    if plan.unknown:
        console.print(f"[yellow]no heartbeat or metrics from: {' '.join(plan.unknown)}")
    for change in plan.changes:
        console.print(change)
