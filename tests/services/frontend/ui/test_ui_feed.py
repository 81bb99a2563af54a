"""The live feed: a snapshot, then changes; shared, bounded, and at rest while nobody looks."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from components.aio import background
from components.errors import Overloaded
from services.frontend.ui import feed as feed_module
from services.frontend.ui.feed import MAX_UNSENT, MAX_VIEWERS, Feed, View, changes
from tests.services.frontend.fake_mesh import FakeMesh
from tests.services.frontend.ui.parts import make_page, served
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Mesh:
    """What the feed looks at."""

    def __init__(self) -> None:
        self.instances: dict[str, dict[str, Any]] = {"d1": {"role": "decode", "running": 0}}
        self.samples: tuple[dict[str, Any], ...] = ()
        self.looks = 0

    def look(self) -> View:
        self.looks += 1
        instances = {name: dict(fields) for name, fields in self.instances.items()}
        return View(instances, {}, {"model": "m"}, self.samples)


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def next_with(events: AsyncGenerator[bytes, None], part: str) -> dict[str, Any]:
    """The next event that has `part`."""
    async for event in events:
        fields = parsed(event)[1]
        if part in fields:
            return fields
    raise AssertionError("the feed has ended")


async def test_a_viewer_gets_a_snapshot_and_then_only_what_changed() -> None:
    mesh = Mesh()
    feed = Feed(mesh.look, every_s=0.001)
    async with background(feed.run(), "feed"):
        events = feed.watch()
        assert parsed(await anext(events)) == (
            "snapshot",
            {"instances": mesh.instances, "links": {}, "about": {"model": "m"}, "samples": []},
        )
        mesh.instances["d1"]["running"] = 3
        assert await next_with(events, "instances") == {"instances": {"d1": {"running": 3}}}
        mesh.instances["d2"] = {"role": "decode"}
        assert await next_with(events, "instances") == {"instances": {"d2": {"role": "decode"}}}
        del mesh.instances["d1"]
        assert await next_with(events, "instances_gone") == {"instances_gone": ["d1"]}
        mesh.samples = ({"t": 1.0}, {"t": 2.0})
        assert await next_with(events, "samples") == {"samples": [{"t": 1.0}, {"t": 2.0}]}
        mesh.samples = (*mesh.samples, {"t": 3.0})
        assert await next_with(events, "samples") == {"samples": [{"t": 3.0}]}
        await events.aclose()


def test_a_field_that_is_gone_becomes_null() -> None:
    was = View({"d1": {"role": "decode", "why": "silent"}}, {"p>d1": {"bytes": 1}})
    now = View({"d1": {"role": "decode"}}, {})
    assert changes(was, now) == {"instances": {"d1": {"why": None}}, "links_gone": ["p>d1"]}
    assert changes(now, now) == {}


async def test_nothing_is_computed_without_viewers() -> None:
    mesh = Mesh()
    feed = Feed(mesh.look, every_s=0.001)
    async with background(feed.run(), "feed"):
        await asyncio.sleep(0.02)
        assert (mesh.looks, feed._viewers) == (0, set())
        events = feed.watch()
        await anext(events)
        assert feed._viewers
        await events.aclose()
        assert not feed._viewers
        await asyncio.sleep(0.02)
        looks = mesh.looks
        await asyncio.sleep(0.02)
        assert mesh.looks == looks


async def test_all_viewers_share_the_same_bytes() -> None:
    mesh = Mesh()
    feed = Feed(mesh.look, every_s=0.001)
    viewers = [feed.watch() for _ in range(3)]
    for viewer in viewers:
        await anext(viewer)
    async with background(feed.run(), "feed"):
        events = [await anext(viewer) for viewer in viewers]
    assert all(event is events[0] for event in events)
    for viewer in viewers:
        await viewer.aclose()


async def test_a_viewer_that_falls_behind_gets_a_new_snapshot() -> None:
    mesh = Mesh()
    feed = Feed(mesh.look, every_s=0.001)
    async with background(feed.run(), "feed"):
        events = feed.watch()
        await anext(events)
        mesh.instances["d1"]["running"] = 1
        await next_with(events, "instances")
        looks = mesh.looks
        while mesh.looks < looks + 2 * MAX_UNSENT:  # it reads nothing meanwhile
            mesh.instances["d1"]["running"] += 1
            await asyncio.sleep(0.001)
        kinds = []
        while "snapshot" not in kinds:
            kind, fields = parsed(await anext(events))
            kinds.append(kind)
        assert len(kinds) <= MAX_UNSENT + 1
        assert fields["instances"]["d1"]["running"] > 1
        await events.aclose()


async def test_viewers_are_bounded() -> None:
    feed = Feed(View)
    viewers = [feed.watch() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await anext(viewer)
    with pytest.raises(Overloaded):
        feed.watch()
    await viewers.pop().aclose()
    await feed.watch().aclose()
    for viewer in viewers:
        await viewer.aclose()


async def test_a_frontend_that_stops_ends_its_feeds_and_takes_no_new_viewer(mesh: FakeMesh) -> None:
    """An endless stream would hold up the drain until its time limit."""
    over: list[bool] = []
    async with (
        served(mesh, make_page(Mesh().look, is_over=lambda: bool(over))) as http,
        http.stream("GET", "/ui/api/feed") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: snapshot"
        over.append(True)
        async for _ in lines:
            pass
        assert (await http.get("/ui/api/feed")).status_code == 503


async def test_a_viewer_that_leaves_is_forgotten(mesh: FakeMesh) -> None:
    ui = make_page(Mesh().look)
    async with served(mesh, ui) as http:
        async with http.stream("GET", "/ui/api/feed") as answer:
            await anext(answer.aiter_lines())
            assert ui.feed._viewers
        await until(lambda: not ui.feed._viewers)


def test_the_rate_is_bounded() -> None:
    assert feed_module.EVERY_S >= 0.25
