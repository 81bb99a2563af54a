"""The mesh on one screen: load, KV usage, heartbeats and links, refreshed once a second."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from components.messaging.liveness import SILENT_AFTER_S
from components.settings import MeshSettings
from components.telemetry.links import links_between
from services.inspect.columns import age, columns
from services.inspect.mesh import STATUS_S, Mesh, Seen, heartbeat_ages_s, open_mesh, state_of

EVERY_S: Final = 1.0
RUNNING: Final = "running"  # state of requests that generate: they are in no queue
LAG_S: Final = 0.25  # of an event loop: late answers to everyone
STYLES: Final = {
    "ok": "green",
    "draining": "yellow",
    "drained": "yellow",
    "silent": "bold red",
    "no answer": "bold red",
}
COLUMNS: Final = (
    *("role", "instance", "devices", "state", "up", "run", "wait", "oldest", "rooms"),
    *("KV", "cached", "tokens/s", "heartbeat", "loop lag"),
)
TEXTS: Final = frozenset({"role", "instance", "state"})  # the other columns are numbers
LEFT_OUT: Final = frozenset({"up", "rooms", "cached", "loop lag"})  # of a narrow screen
ALL_COLUMNS_WIDTH: Final = 106
FRAME_LINES: Final = 6  # beside the two tables' rows


@dataclass(frozen=True, slots=True)
class Row:
    role: str
    instance: str
    state: str
    up_s: float = 0.0
    running: int = 0
    waiting: int = 0
    oldest_queued_s: float = 0.0
    rooms: int = 0
    kv_used: float | None = None  # share of the pages; None: no worker
    kv_cached: float | None = None
    tokens_per_s: float = 0.0
    heartbeat_age_s: float | None = None  # None: it sends none
    event_loop_lag_s: float = 0.0
    devices: int = 0  # of a worker


@dataclass(frozen=True, slots=True)
class Link:
    prefill: str
    decode: str
    transfers: int
    failures: int
    bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Frame:
    """The contents of one refresh."""

    namespace: str
    unix_s: float
    rows: Sequence[Row]
    links: Sequence[Link]

    def tokens_per_s(self, role: str) -> float:
        return sum(row.tokens_per_s for row in self.rows if row.role == role)

    def json(self) -> dict[str, Any]:
        decoded, prefilled = self.tokens_per_s("decode"), self.tokens_per_s("prefill")
        return {**asdict(self), "decoded_tokens_per_s": decoded, "prefilled_tokens_per_s": prefilled}


def frame_of(seen: Sequence[Seen], namespace: str, unix_s: float) -> Frame:
    ages = heartbeat_ages_s(seen)
    return Frame(namespace, unix_s, [_row(one, ages.get(one.instance_id)) for one in seen], links_of(seen))


def links_of(seen: Sequence[Seen]) -> list[Link]:
    """Return the links, fastest first."""
    roles = {one.instance_id: one.role for one in seen}
    reported = {one.instance_id: one.status.links for one in seen if one.status is not None}
    links = [
        Link(*ends, link.transfers, link.failures, link.bytes, link.bytes_per_s)
        for ends, link in links_between(roles, reported).items()
    ]
    return sorted(links, key=lambda link: (-link.bytes_per_s, -link.bytes, link.prefill, link.decode))


def drawn(frame: Frame, width: int, height: int | None = None) -> Group:
    """Draw a frame on `width` columns and `height` lines. Instances with problems are first; other rows are counted."""
    rows = sorted(frame.rows, key=lambda row: row.state == "ok")
    links = list(frame.links)
    room = len(rows) + len(links) if height is None else max(2, height - FRAME_LINES - bool(links) * 2)
    shown_links = links[: max(room - len(rows), min(len(links), room // 4))]
    shown = rows[: max(1, room - len(shown_links))]
    parts: list[Any] = [_summary(frame), _table(shown, width)]
    if len(rows) > len(shown):
        parts.append(Text(f"… and {len(rows) - len(shown)} more instances", style="dim"))
    if shown_links:
        parts += [Text(""), _links(shown_links)]
    if len(links) > len(shown_links):
        parts.append(Text(f"… and {len(links) - len(shown_links)} more links", style="dim"))
    return Group(*parts)


async def show_top(settings: MeshSettings, console: Console, *, once: bool, as_json: bool) -> None:
    async with open_mesh(settings) as mesh:
        if as_json:
            while True:
                console.out(json.dumps((await _frame(mesh, STATUS_S if once else EVERY_S)).json()), highlight=False)
                if once:
                    return
                await asyncio.sleep(EVERY_S)
        if once or not console.is_terminal:
            console.print(drawn(await _frame(mesh), console.width))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                began_s = time.monotonic()
                live.update(drawn(await _frame(mesh, EVERY_S), console.width, console.height), refresh=True)
                await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began_s)))


async def _frame(mesh: Mesh, wait_s: float = STATUS_S) -> Frame:
    return frame_of(await mesh.snapshot(wait_s=wait_s), mesh.namespace, time.time())


def _row(one: Seen, heartbeat_age_s: float | None) -> Row:
    status, state = one.status, state_of(one, heartbeat_age_s, SILENT_AFTER_S)
    kv = None if one.record is None else one.record.kv
    devices = 0 if kv is None else len(kv.devices)
    if status is None:
        up_s = 0.0 if one.record is None else time.time() - one.record.started_unix_ms / 1000
        return Row(one.role, one.instance_id, state, up_s=up_s, heartbeat_age_s=heartbeat_age_s, devices=devices)
    pages = status.pages
    total = 0 if pages is None else pages.total
    return Row(
        one.role,
        one.instance_id,
        state,
        up_s=status.uptime_s,
        running=status.running,
        waiting=status.waiting,
        oldest_queued_s=max((s for state, s in status.oldest_queued_s.items() if state != RUNNING), default=0.0),
        rooms=status.num_rooms,
        kv_used=None if pages is None or not total else (total - pages.free - pages.cached) / total,
        kv_cached=None if pages is None or not total else pages.cached / total,
        tokens_per_s=status.tokens_per_s,
        heartbeat_age_s=heartbeat_age_s,
        event_loop_lag_s=status.event_loop_lag_s,
        devices=devices,
    )


def _summary(frame: Frame) -> Text:
    bad = sum(row.state in ("silent", "no answer") for row in frame.rows)
    running = sum(row.running for row in frame.rows if row.role == "decode")
    queued = sum(row.waiting for row in frame.rows)
    when = time.strftime("%H:%M:%S", time.localtime(frame.unix_s))
    text = Text.assemble(
        (f"{frame.namespace}  {when}", "bold"),
        f"  {len(frame.rows)} instances  {frame.tokens_per_s('decode'):.0f} tokens/s generated",
        f"  {frame.tokens_per_s('prefill'):.0f} tokens/s of prompts  {running} running  {queued} queued",
    )
    return text.append(f"  {bad} in trouble", style="bold red") if bad else text


def _table(rows: Sequence[Row], width: int) -> Table:
    """Return the table of instances, with a column of devices if a worker has several."""
    hidden = set() if width >= ALL_COLUMNS_WIDTH else set(LEFT_OUT)
    if all(row.devices <= 1 for row in rows):
        hidden.add("devices")
    names = [name for name in COLUMNS if name not in hidden]
    table = columns(*(name if name in TEXTS else f">{name}" for name in names))
    for row in rows:
        cells = _cells(row)
        table.add_row(*(cells[name] for name in names))
    return table


def _cells(row: Row) -> Mapping[str, str | Text]:
    beat_s, lag_s = row.heartbeat_age_s, row.event_loop_lag_s
    return {
        "role": row.role,
        "instance": row.instance,
        "devices": str(row.devices or ""),
        "state": Text(row.state, STYLES[row.state]),
        "up": age(row.up_s),
        "run": str(row.running),
        "wait": str(row.waiting),
        "oldest": f"{row.oldest_queued_s:.1f} s" if row.oldest_queued_s else "",
        "rooms": str(row.rooms or ""),
        "KV": _percent(row.kv_used),
        "cached": _percent(row.kv_cached),
        "tokens/s": f"{row.tokens_per_s:.0f}",
        "heartbeat": "" if beat_s is None else Text(f"{beat_s:.1f} s", "bold red" if beat_s > SILENT_AFTER_S else ""),
        "loop lag": Text(f"{lag_s * 1000:.0f} ms", "yellow" if lag_s > LAG_S else ""),
    }


def _links(links: Iterable[Link]) -> Table:
    table = columns("KV from → to", ">transfers", ">failed", ">moved", ">now")
    for link in links:
        table.add_row(
            f"{link.prefill} → {link.decode}",
            str(link.transfers),
            Text(str(link.failures), "bold red" if link.failures else ""),
            size(link.bytes),
            f"{size(link.bytes_per_s)}/s",
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def size(count: float) -> str:
    """Return a size as `12 B`, `3.4 MB` or `5.6 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"
