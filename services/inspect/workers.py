"""Instances as etcd knows them beside what NATS answers: a difference is what one is looking for."""

import asyncio
import json
import time
from typing import Any

from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from components.discovery.registry import join_registry
from components.messaging.bus import Bus, connect_bus
from components.messaging.roll_call import RollCall
from components.settings import MeshSettings
from components.urls import without_password
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from services.inspect.ages import age

LISTEN_S = 1.2  # for answers to $SRV.STATS
BESIDE = ("kvmesh-planner", "kvmesh-local")  # answer on NATS and serve no requests, so they are not in etcd
RIGHT = ("pid", "up", "run", "wait", "held", "pages", "errors")  # columns of numbers
WORKERS: tuple[Role, ...] = ("decode", "prefill")
ROLES: tuple[Role, ...] = ("frontend", "bootstrap", *WORKERS)


async def show_workers(settings: MeshSettings, console: Console, *, wide: bool = False) -> None:
    """Print the tables."""
    try:
        async with asyncio.timeout(8):
            await _show(settings, console, wide=wide)
    except TimeoutError:
        raise SystemExit(
            f"no answer from etcd at {without_password(settings.etcd_url)} or NATS at {without_password(settings.nats_url)}: "
            "name them with --etcd-url and --nats-url (services.local prints both)"
        ) from None


async def _show(settings: MeshSettings, console: Console, *, wide: bool) -> None:
    async with (
        connect_bus(settings.nats_url, "inspect") as bus,
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s) as registry,
    ):
        calls = [RollCall(bus, settings.namespace, role, registry.book).answers() for role in WORKERS]
        answers, services = await asyncio.gather(asyncio.gather(*calls), _services(bus, settings.namespace))
        beats = {name: beat for of_role in answers for name, beat in of_role.beats.items()}
        records = [r for role in ROLES for r in registry.book.of_role(role)]
        console.print(
            summary(records, settings.namespace), "", load_table(records, beats, services, wide=wide), sep="\n"
        )
        console.print("", address_table(records), sep="\n")
        strangers = services.keys() - {r.instance_id for r in records}
        for instance_id in sorted(strangers):
            console.print(f"[yellow]answers on NATS but is not in etcd: {services[instance_id]['name']} {instance_id}")


async def _services(bus: Bus, namespace: str) -> dict[str, dict[str, Any]]:
    """Answers to `$SRV.STATS` by instance id; services of other namespaces on this NATS answer too, and are left out."""
    found: dict[str, dict[str, Any]] = {}

    async def receive(message: Msg) -> None:
        if not message.data:  # NATS itself: nobody is there
            return
        answer = json.loads(message.data)
        about = answer.get("metadata") or {}
        ours = about.get("subject", "").startswith(f"{namespace}.") and answer["name"] not in BESIDE
        if ours and (instance_id := about.get("instance_id")):
            found[instance_id] = answer

    inbox = bus.client.new_inbox()
    async with bus.subscription(inbox, receive):
        await bus.client.publish("$SRV.STATS", reply=inbox)
        await asyncio.sleep(LISTEN_S)
    return found


def summary(records: list[InstanceRecord], namespace: str) -> str:
    """A line above the tables: how many of which model."""
    models = sorted({name for record in records for name in (record.model, *record.adapters) if name})
    return f"namespace {namespace}: {len(records)} instances" + (f" of {', '.join(models)}" if models else "")


def load_table(
    records: list[InstanceRecord], beats: dict[str, Heartbeat], services: dict[str, dict[str, Any]], *, wide: bool
) -> Table:
    """What each instance is and does; `wide` has everything, and needs some 150 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("role", "instance", "pid", "up", "state", "run", "wait", "held", "pages", "errors"):
        table.add_column(name, no_wrap=True, justify="right" if name in RIGHT else "left")
    for name in ("epoch", "host", "model", "pages free/cached/held", "calls by NATS") if wide else ():
        table.add_column(name, no_wrap=True)
    for record in records:
        beat, service = beats.get(record.instance_id), services.get(record.instance_id)
        table.add_row(*_row(record, beat, service), *(_more(record, beat, service) if wide else ()))
    return table


def address_table(records: list[InstanceRecord]) -> Table:
    """Where each instance answers over HTTP: clients at a frontend, Prometheus at `/metrics` of each page."""
    table = Table(box=None, pad_edge=False)
    for name in ("role", "instance", "serves clients at", "metrics and health at"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for record in records:
        is_frontend = record.role == "frontend"
        page = record.metrics if is_frontend else record.http
        table.add_row(record.role, record.instance_id, (record.http or "") if is_frontend else "", page or "")
    return table


def _row(record: InstanceRecord, beat: Heartbeat | None, service: dict[str, Any] | None) -> list[str]:
    up_s = time.time() - record.started_unix_ms / 1000
    errors = "" if service is None else str(sum((e.get("data") or {}).get("errors", 0) for e in service["endpoints"]))
    about = [record.role, record.instance_id, str(record.pid), age(up_s), _state(record, beat, service)]
    if beat is None:
        return [*about, "", "", "", "", errors]
    used = beat.total_pages - beat.free_pages - beat.cached_pages
    counts = [str(count) for count in (beat.num_running, beat.num_waiting, beat.num_held)]
    return [*about, *counts, f"{100 * used / max(1, beat.total_pages):.0f} % of {beat.total_pages}", errors]


def _state(record: InstanceRecord, beat: Heartbeat | None, service: dict[str, Any] | None) -> str:
    """What etcd and NATS disagree on is what one is looking for."""
    if service is None:
        return "[red]no answer"
    if beat is None and record.kv is not None:
        return "[red]silent"
    return "draining" if beat is not None and beat.draining else "ok"


def _more(record: InstanceRecord, beat: Heartbeat | None, service: dict[str, Any] | None) -> list[str]:
    pages = "" if beat is None else f"{beat.free_pages}/{beat.cached_pages}/{beat.held_pages}"
    endpoints = [] if service is None else service["endpoints"]
    calls = " ".join(f"{e['name']}:{e['num_requests']}" for e in endpoints if e["num_requests"])
    return [record.epoch, record.host, " ".join([record.model or "", *record.adapters]), pages, calls]
