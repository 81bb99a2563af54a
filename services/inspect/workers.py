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

LISTEN_S = 1.2  # for answers to $SRV.STATS
BESIDE = ("kvmesh-planner", "kvmesh-local")  # answer on NATS and serve no requests, so they are not in etcd
WORKERS: tuple[Role, ...] = ("decode", "prefill")
ROLES: tuple[Role, ...] = ("frontend", "bootstrap", *WORKERS)


async def show_workers(settings: MeshSettings, console: Console) -> None:
    """Print the table."""
    try:
        async with asyncio.timeout(8):
            await _show(settings, console)
    except TimeoutError:
        raise SystemExit(
            f"no answer from etcd at {without_password(settings.etcd_url)} or NATS at {without_password(settings.nats_url)}: "
            "name them with --etcd-url and --nats-url (services.local prints both)"
        ) from None


async def _show(settings: MeshSettings, console: Console) -> None:
    async with (
        connect_bus(settings.nats_url, "inspect") as bus,
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s) as registry,
    ):
        calls = [RollCall(bus, settings.namespace, role, registry.book).answers() for role in WORKERS]
        answers, services = await asyncio.gather(asyncio.gather(*calls), _services(bus, settings.namespace))
        beats = {name: beat for of_role in answers for name, beat in of_role.beats.items()}
        records = [r for role in ROLES for r in registry.book.of_role(role)]
        console.print(_table(records, beats, services))
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


def _table(records: list[InstanceRecord], beats: dict[str, Heartbeat], services: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="etcd ⟷ NATS")
    for name in (
        "role",
        "instance",
        "epoch",
        "host:pid",
        "up",
        "model",
        "NATS calls",
        "errors",
        "run/wait/held",
        "pages free/cached/held",
    ):
        table.add_column(name)
    for record in records:
        table.add_row(*_row(record, beats.get(record.instance_id), services.get(record.instance_id)))
    return table


def _row(record: InstanceRecord, beat: Heartbeat | None, service: dict[str, Any] | None) -> list[str]:
    up_s = time.time() - record.started_unix_ms / 1000
    if service is None:
        calls, errors = "[red]no answer", ""
    else:
        endpoints = service["endpoints"]
        calls = " ".join(f"{e['name']}:{e['num_requests']}" for e in endpoints if e["num_requests"]) or "-"
        errors = str(sum((e.get("data") or {}).get("errors", 0) for e in endpoints))
    if beat is not None:
        load = f"{beat.num_running}/{beat.num_waiting}/{beat.num_held}" + (" draining" if beat.draining else "")
        pages = f"{beat.free_pages}/{beat.cached_pages}/{beat.held_pages} of {beat.total_pages}"
    else:
        load, pages = ("[red]silent", "") if record.kv is not None else ("", "")
    return [
        record.role,
        record.instance_id,
        record.epoch,
        f"{record.host}:{record.pid}",
        f"{up_s:.0f} s",
        " ".join([record.model or "", *record.adapters]),
        calls,
        errors,
        load,
        pages or " ".join(filter(None, (record.http, record.metrics))),
    ]
