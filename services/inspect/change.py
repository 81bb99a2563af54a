"""Changes running processes: log level, trace rate, draining."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console

from components.errors import MeshError, NobodyListens
from components.settings import MeshSettings
from components.wire.control import Control, Controlled
from components.wire.status import Status, StatusRequest
from services.inspect.mesh import ROLES, Mesh, Seen, has_work, open_mesh

ANSWER_S: Final = 3.0
LOOK_EVERY_S: Final = 0.5
EVERYWHERE: Final = "all"
NAMES: Final = (*ROLES, "planner")  # of all instances of a role


@dataclass(frozen=True, slots=True)
class Outcome:
    role: str
    instance: str
    error: str = ""
    log_level: str = ""
    traces_per_s: float = 0.0
    draining: bool = False

    @property
    def text(self) -> str:
        result = self.error or f"log level {self.log_level}, {self.traces_per_s:g} traces/s"
        return f"{self.role} {self.instance}: {result}"


def chosen(instances: Sequence[Seen], which: str) -> list[Seen]:
    """Return the instances. `which`: all, a role, or as for `one_of`. Raises: SystemExit, if not found or ambiguous."""
    if which == EVERYWHERE:
        return list(instances)
    if which in NAMES:
        found = [one for one in instances if one.role == which]
        if not found:
            raise SystemExit(f"no {which} is running in this mesh")
        return found
    return [one_of(instances, which, hint=f", and it is neither all nor a role ({', '.join(NAMES)})")]


def one_of(instances: Sequence[Seen], which: str, *, hint: str = "") -> Seen:
    """Return one instance. `which`: an id or its beginning, or ROLE/ID. `hint`: other values that were possible.

    Raises: SystemExit, unless there is exactly one.
    """
    role, _, wanted = which.rpartition("/")
    found = [one for one in instances if one.instance_id.startswith(wanted) and role in ("", one.role)]
    found = [one for one in found if one.instance_id == wanted] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise SystemExit(f"several instance ids begin with {which!r}: {_ids(found)}; name one as ROLE/ID")
    raise SystemExit(f"no instance id begins with {which!r}{hint}; there are {_ids(instances) or 'no instances'}")


async def show_set(settings: MeshSettings, console: Console, which: str, wanted: Control, *, as_json: bool) -> bool:
    """Return whether all changes succeeded."""
    async with open_mesh(settings) as mesh:
        targets = chosen(await mesh.instances(), which)
        outcomes = await asyncio.gather(*(_change(mesh, one, wanted) for one in targets))
    if as_json:
        console.out(json.dumps([asdict(one) for one in outcomes]), highlight=False)
    else:
        for outcome in outcomes:
            console.print(outcome.text, style="red" if outcome.error else "", highlight=False, soft_wrap=True)
    return not any(outcome.error for outcome in outcomes)


async def show_drain(
    settings: MeshSettings, console: Console, which: str, wanted: Control, *, wait: bool, as_json: bool
) -> bool:
    async with open_mesh(settings) as mesh:
        one = one_of(await mesh.instances(), which)
        outcome = await _change(mesh, one, wanted)
        if as_json:
            pass
        elif outcome.error:
            console.print(outcome.text, style="red", highlight=False, soft_wrap=True)
        else:
            console.print(_began(one, wanted), highlight=False, soft_wrap=True)
        waits = wait and not outcome.error and wanted.work != "go-on"
        if waits:
            await _until_drained(mesh, one)
    if as_json:
        console.out(json.dumps(asdict(outcome)), highlight=False)
    elif waits:
        console.print(f"{one.role} {one.instance_id} has no work left", highlight=False)
    return not outcome.error


def _began(one: Seen, wanted: Control) -> str:
    who = f"{one.role} {one.instance_id}"
    if wanted.work == "go-on":
        return f"{who} accepts new requests again"
    if wanted.work == "stop":
        return f"{who} finishes its requests and exits; a supervisor such as services.local starts another one"
    return f"{who} drains: it keeps running but accepts no new requests; undo with `inspect drain {one.instance_id} --undo`"


async def _until_drained(mesh: Mesh, one: Seen) -> None:
    """Wait until the instance has no work left, or is gone."""
    while True:
        try:
            status = await mesh.bus.call(f"{one.subject}.status", StatusRequest(), Status, timeout_s=ANSWER_S)
        except MeshError as exc:  # it may be busy, or NATS briefly unreachable
            if _is_gone(mesh, one, exc):
                return
        else:
            if not has_work(status):
                return
        await asyncio.sleep(LOOK_EVERY_S)


def _is_gone(mesh: Mesh, one: Seen, error: MeshError) -> bool:
    if one.record is None:  # a planner, which is not in etcd
        return isinstance(error, NobodyListens)
    epochs = [record.epoch for record in mesh.book.of_role(one.record.role) if record.instance_id == one.instance_id]
    return one.record.epoch not in epochs


async def _change(mesh: Mesh, one: Seen, wanted: Control) -> Outcome:
    try:
        now = await mesh.bus.call(f"{one.subject}.control", wanted, Controlled, timeout_s=ANSWER_S)
    except MeshError as exc:
        return Outcome(one.role, one.instance_id, exc.message)
    return Outcome(one.role, one.instance_id, "", now.log_level, now.traces_per_s, now.draining)


def _ids(instances: Sequence[Seen]) -> str:
    return ", ".join(f"{one.instance_id} ({one.role})" for one in instances)
