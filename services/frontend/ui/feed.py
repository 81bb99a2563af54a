"""The live feed of `/ui`: a snapshot and then changes, as server-sent events. All viewers get the same bytes.

Nothing is computed while there are no viewers.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from components.errors import Overloaded

EVERY_S: Final = 0.5  # between two events
MAX_VIEWERS: Final = 64  # each holds a connection
MAX_UNSENT: Final = 8  # events; a viewer that is further behind gets a new snapshot

Fields = Mapping[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class View:
    """The mesh at one moment, as JSON values."""

    instances: Mapping[str, Fields] = field(default_factory=dict)  # by instance id
    links: Mapping[str, Fields] = field(default_factory=dict)  # by "prefill>decode"
    about: Fields = field(default_factory=dict)  # of the mesh as a whole
    samples: tuple[Fields, ...] = ()  # of load over time, oldest first


class Viewer:
    __slots__ = ("unsent", "wants_snapshot", "woken")

    def __init__(self) -> None:
        self.unsent: deque[bytes] = deque()
        self.wants_snapshot = True
        self.woken = asyncio.Event()

    def add(self, event: bytes) -> None:
        if len(self.unsent) >= MAX_UNSENT:
            self.unsent.clear()
            self.wants_snapshot = True
        if not self.wants_snapshot:
            self.unsent.append(event)
        self.woken.set()


class Feed:
    def __init__(
        self, look: Callable[[], View], is_over: Callable[[], bool] = lambda: False, every_s: float = EVERY_S
    ) -> None:
        """`look` returns the current state of the mesh. When `is_over`, streams end and new viewers are refused."""
        self._look = look
        self._is_over = is_over
        self._every_s = every_s
        self._viewers: set[Viewer] = set()
        self._watched = asyncio.Event()
        self._seen = View()

    async def watched(self) -> None:
        await self._watched.wait()

    async def run(self) -> None:
        while True:
            await self._watched.wait()
            if self._is_over():
                self._end()
                continue
            seen, self._seen = self._seen, self._look()
            change = encode("change", changes(seen, self._seen))
            for viewer in self._viewers:
                viewer.add(change)
            await asyncio.sleep(self._every_s)

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Return the events until the feed is over. Raises: Overloaded."""
        if self._is_over() or len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded("the live feed has too many viewers", retry_after_s=5.0)
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        if not self._viewers:
            self._seen = self._look()
        viewer = Viewer()
        self._viewers.add(viewer)
        self._watched.set()
        try:
            while viewer in self._viewers:
                if viewer.wants_snapshot:
                    viewer.wants_snapshot = False
                    yield encode("snapshot", whole(self._seen))
                while viewer.unsent:
                    yield viewer.unsent.popleft()
                viewer.woken.clear()
                if not viewer.wants_snapshot and viewer in self._viewers:
                    await viewer.woken.wait()
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._watched.clear()

    def _end(self) -> None:
        viewers, self._viewers = self._viewers, set()
        self._watched.clear()
        for viewer in viewers:
            viewer.woken.set()


def encode(event: str, fields: Fields) -> bytes:
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return f"event: {event}\ndata: {data}\n\n".encode()


def whole(view: View) -> Fields:
    return {
        "instances": dict(view.instances),
        "links": dict(view.links),
        "about": dict(view.about),
        "samples": list(view.samples),
    }


def changes(was: View, now: View) -> Fields:
    """Return changed fields of instances and links, removed ones, and new or changed samples, without empty parts."""
    found: dict[str, Any] = {}
    for name, old, new in (("instances", was.instances, now.instances), ("links", was.links, now.links)):
        changed = {key: _changed(old.get(key), fields) for key, fields in new.items() if old.get(key) != fields}
        if changed:
            found[name] = changed
        if gone := [key for key in old if key not in new]:
            found[f"{name}_gone"] = gone
    if about := {name: value for name, value in now.about.items() if was.about.get(name) != value}:
        found["about"] = about
    old = {sample["t"]: sample for sample in was.samples}
    if samples := [sample for sample in now.samples if old.get(sample["t"]) != sample]:
        found["samples"] = samples
    return found


def _changed(was: Fields | None, now: Fields) -> Fields:
    if was is None:
        return now
    lost = dict.fromkeys(was.keys() - now.keys())  # null
    return {**lost, **{name: value for name, value in now.items() if was.get(name) != value}}
