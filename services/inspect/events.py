"""Prints changes of the mesh as they happen, by records in etcd and heartbeats over NATS; one line each."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from components.aio import background
from components.errors import MeshError
from components.messaging.liveness import Liveness, watch_heartbeats
from components.settings import MeshSettings
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from services.inspect.mesh import WORKERS, Mesh, has_requests, open_mesh, planners

PLANNERS_EVERY_S: Final = 2.0
CONNECTIONS_EVERY_S: Final = 0.2
STYLES: Final = {
    "registered": "green",
    "is back": "green",
    "left etcd": "yellow",
    "lost": "bold red",
    "draining": "yellow",
}


@dataclass(frozen=True, slots=True)
class Event:
    unix_s: float
    source: str  # etcd, heartbeat or NATS
    what: str
    role: str
    instance: str
    facts: str = ""

    def json(self) -> str:
        return json.dumps(asdict(self))

    def text(self) -> Text:
        when = time.strftime("%H:%M:%S", time.localtime(self.unix_s)) + f".{int(self.unix_s % 1 * 1000):03d}"
        return Text.assemble(
            (when, "dim"),
            f"  {self.source:<9}  {self.role:<9}  {self.instance:<8}  ",
            (self.what, STYLES.get(self.what, "")),
            f"  {self.facts}" if self.facts else "",
        )


class Watch:
    """Converts changes and heartbeats to events. No I/O."""

    def __init__(self, emit: Callable[[Event], None], clock: Callable[[], float] = time.time) -> None:
        self._emit = emit
        self._clock = clock
        self._states: dict[str, str] = {}  # of workers, by heartbeat
        self._planners: Mapping[str, str] | None = None  # subject by instance id; None: not asked yet

    def found(self, record: InstanceRecord) -> None:
        """Report an instance that was registered before the watch began."""
        self._event("etcd", "is there", record.role, record.instance_id, _about(record))

    def record_changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        record = now or was
        assert record is not None
        if now is None:
            self._states.pop(record.instance_id, None)
            self._event("etcd", "left etcd", record.role, record.instance_id)
        elif was is None:
            self._event("etcd", "registered", record.role, record.instance_id, _about(record))
        else:
            again = f"epoch {was.epoch} → {now.epoch}" if was.epoch != now.epoch else "its record"
            self._event("etcd", "changed", record.role, record.instance_id, again)

    def record_heartbeat(self, role: str, beat: Heartbeat) -> None:
        before = self._states.get(beat.instance_id)
        load = f"{beat.num_running} running {beat.num_waiting} waiting"
        now = "up" if not beat.draining else "draining" if has_requests(beat) else "drained"
        if before == now:
            return
        self._states[beat.instance_id] = now
        if now != "up":
            self._event("heartbeat", now, role, beat.instance_id, load if now == "draining" else "")
        elif before == "lost":
            self._event("heartbeat", "is back", role, beat.instance_id)
        elif before is None:
            self._event("heartbeat", "first heartbeat", role, beat.instance_id, f"{beat.total_pages} pages")
        else:
            self._event("heartbeat", "accepts work again", role, beat.instance_id)

    def lost(self, record: InstanceRecord, why: str) -> None:
        if why != "left etcd":  # that has a line of its own
            self._states[record.instance_id] = "lost"
            self._event("heartbeat", "lost", record.role, record.instance_id, why)

    def planners(self, found: Mapping[str, str]) -> None:
        before, self._planners = self._planners, found
        for instance_id, subject in found.items():
            if before is None or instance_id not in before:
                self._event("NATS", "answers", "planner", instance_id, f"as {subject}")
        for instance_id in (before or {}).keys() - found.keys():
            self._event("NATS", "answers no more", "planner", instance_id)

    def connection(self, *, connected: bool) -> None:
        self._event("NATS", "reached again" if connected else "out of reach", "inspect", "")

    def etcd(self, *, connected: bool) -> None:
        self._event("etcd", "reached again" if connected else "out of reach", "inspect", "")

    def _event(self, source: str, what: str, role: str, instance: str, facts: str = "") -> None:
        self._emit(Event(self._clock(), source, what, role, instance, facts))


def _about(record: InstanceRecord) -> str:
    return " ".join(filter(None, (f"{record.host}:{record.pid}", record.model, record.http)))


async def show_events(settings: MeshSettings, console: Console, *, as_json: bool) -> None:
    """Print events until Ctrl-C. The first lines list the instances that are already registered."""

    def emit(event: Event) -> None:
        if as_json:
            console.out(event.json(), highlight=False)
        else:
            console.print(event.text(), soft_wrap=True)

    async with open_mesh(settings) as mesh:
        watch = Watch(emit)
        for record in mesh.records():
            watch.found(record)
        mesh.book.subscribe(watch.record_changed)
        decode, prefill = (watch_heartbeats(mesh.bus, mesh.namespace, role, mesh.book) for role in WORKERS)
        async with decode as of_decode, prefill as of_prefill:
            for role, liveness in zip(WORKERS, (of_decode, of_prefill), strict=True):
                _follow(watch, role, liveness)
            async with background(_ask_planners(mesh, watch), "planners"):
                await _watch_connections(mesh, watch)


def _follow(watch: Watch, role: str, liveness: Liveness) -> None:
    liveness.on_lost(watch.lost)
    liveness.on_heartbeat(lambda beat: watch.record_heartbeat(role, beat))


async def _ask_planners(mesh: Mesh, watch: Watch) -> None:
    while True:
        with suppress(MeshError):  # in an outage; a hanging NATS counts as connected for another second
            if mesh.bus.is_connected:
                watch.planners(await planners(mesh.bus, mesh.namespace))
        await asyncio.sleep(PLANNERS_EVERY_S)


async def _watch_connections(mesh: Mesh, watch: Watch) -> None:
    connected = followed = True
    while True:
        if mesh.bus.is_connected != connected:
            connected = mesh.bus.is_connected
            watch.connection(connected=connected)
        if mesh.follows_etcd() != followed:
            followed = mesh.follows_etcd()
            watch.etcd(connected=followed)
        await asyncio.sleep(CONNECTIONS_EVERY_S)
