"""Shows open bootstrap rooms: one line per transfer, with the state that each of its three sides reports."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.settings import MeshSettings
from components.wire.status import RoomStatus
from services.inspect.columns import age, columns
from services.inspect.mesh import Seen, open_mesh

OLD_S: Final = 10.0  # a transfer usually takes much less


@dataclass(frozen=True, slots=True)
class Side:
    instance: str
    state: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Room:
    room: str
    request_id: str
    age_s: float  # by the side that has it longest
    decode: Side | None = None
    bootstrap: Side | None = None
    prefill: Side | None = None


def joined(seen: Iterable[Seen]) -> list[Room]:
    """Return the rooms, oldest first."""
    sides: dict[str, dict[str, tuple[Side, RoomStatus]]] = {}
    for one in seen:
        for room in () if one.status is None else one.status.rooms:
            side = Side(one.instance_id, room.state, room.age_s)
            sides.setdefault(room.room, {})[one.role] = side, room
    rooms = [
        Room(
            name,
            next((room.request_id for _, room in of.values() if room.request_id), ""),
            max(side.age_s for side, _ in of.values()),
            **{role: side for role, (side, _) in of.items()},
        )
        for name, of in sides.items()
    ]
    return sorted(rooms, key=lambda room: -room.age_s)


async def show_rooms(settings: MeshSettings, console: Console, *, as_json: bool) -> None:
    async with open_mesh(settings) as mesh:
        seen = await mesh.snapshot()
    rooms = joined(seen)
    if as_json:
        console.out(json.dumps([asdict(room) for room in rooms]), highlight=False)
        return
    if not rooms:
        console.print("no room is open: no KV transfer is in progress")
        return
    console.print(room_table(rooms))
    hidden = sum(one.status.num_rooms - len(one.status.rooms) for one in seen if one.status is not None)
    if hidden:
        console.print(f"[yellow]newer rooms that are not shown, counted on each side: {hidden}")


def room_table(rooms: Sequence[Room]) -> Table:
    table = columns("room", ">age", "request", "decode", "bootstrap", "prefill", folds=True)
    for room in rooms:
        old = "yellow" if room.age_s > OLD_S else ""
        table.add_row(
            room.room,
            Text(age(room.age_s), old),
            room.request_id,
            *(_shown(side) for side in (room.decode, room.bootstrap, room.prefill)),
        )
    return table


def _shown(side: Side | None) -> str:
    return "" if side is None else f"{side.instance} {side.state} {side.age_s:.1f} s"
