"""Traces without what clients sent, and the button that kills."""

import json
from typing import Any

import pytest
from starlette.requests import Request

from components.telemetry.stored_spans import Event, Span
from services.frontend.config import FrontendSettings
from services.frontend.ui.control import is_from_this_machine
from services.frontend.ui.run_ui import shows_content
from services.frontend.ui.traces import Traces
from tests.services.frontend.fake_mesh import FakeMesh
from tests.services.frontend.ui.parts import SECRET, TRACE_ID, FakeControl, FakeReader, make_page, served, trace

pytestmark = pytest.mark.anyio
OWN = {"x-kvmesh-ui": "1"}


async def test_lists_of_requests_have_the_end_of_each(mesh: FakeMesh) -> None:
    reader = FakeReader([trace("b" * 32, error=f"cannot read '{SECRET}'"), trace()])
    async with served(mesh, make_page(reader=reader)) as http:
        found = (await http.get("/ui/api/requests")).json()
        assert found["place"] == "memory"
        assert [(one["trace_id"][0], one["status"], one["moved"]) for one in found["traces"]] == [
            ("b", "error", True),
            ("a", "ok", True),
        ]
        assert found["traces"][0]["error"] == "cannot read '…'"
        assert found["traces"][1]["decode_ids"] == ["d1"]
        failed = (await http.get("/ui/api/requests?which=failed")).json()["traces"]
        assert [one["trace_id"][0] for one in failed] == ["b"]
        assert (await http.get("/ui/api/requests?which=slow")).json()["traces"] == []
        wrong = await http.get("/ui/api/requests?which=all")
        assert wrong.status_code == 400
        assert "which=recent, slow, failed" in wrong.json()["error"]["message"]


async def test_many_viewers_cost_one_read_of_the_store(mesh: FakeMesh) -> None:
    reader = FakeReader()
    async with served(mesh, make_page(reader=reader)) as http:
        answers = [(await http.get("/ui/api/requests")).content for _ in range(20)]
    assert len(set(answers)) == 1
    assert reader.reads < 20


@pytest.mark.parametrize("shows_content", [False, True])
async def test_what_clients_sent_is_shown_only_if_opted_in(mesh: FakeMesh, shows_content: bool) -> None:
    reader = FakeReader([trace(error=f"no '{SECRET}'")])
    async with served(mesh, make_page(reader=reader, shows_content=shows_content)) as http:
        paths = ("requests", "requests?which=failed", f"traces/{TRACE_ID}", f"traces/{TRACE_ID}/perfetto")
        shown = [(await http.get(f"/ui/api/{path}")).text for path in paths]
    assert [SECRET in text for text in shown] == [shows_content] * 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"ui_content": False}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "ui_content": True}, True),
        ({"api_keys": "sk-one-0123456789"}, False),
        ({"api_keys_file": "keys.toml"}, False),
    ],
)
def test_content_is_shown_where_it_is_the_viewers_own(settings: dict[str, Any], expected: bool) -> None:
    """The page of a local mesh hid the names of wrong parameters, which `inspect traces` printed."""
    assert shows_content(FrontendSettings(**settings)) is expected


async def test_why_a_request_was_refused_is_content() -> None:
    facts = {"kvmesh.refused": f"Unknown parameter: '{SECRET}'."}
    shown = Traces(None, reader=FakeReader()).shown(Span("t", "1", None, "s", "n", 0, 1, "UNSET", facts))
    assert shown.attributes == {"kvmesh.refused": "Unknown parameter: '…'."}


async def test_every_attribute_that_is_not_known_is_content() -> None:
    spans = [
        Span(
            "t",
            "1",
            None,
            "s",
            "n",
            0,
            1,
            "UNSET",
            {"gen_ai.input.messages": SECRET, "user": SECRET, "kvmesh.pages": 3},
        )
    ]
    traces = Traces(None, reader=FakeReader([spans]))
    [shown] = await traces.trace("t", None, lambda found: found.spans)
    assert shown.attributes == {"kvmesh.pages": 3}
    event = Event("e", 0, {"cause": f'"{SECRET}" and {3}', "count": 2})
    assert traces.shown(Span("t", "1", None, "s", "n", 0, 1, "UNSET", {}, "", (event,))).events[0].attributes == {
        "cause": "'…' and 3",
        "count": 2,
    }


async def test_a_trace_has_times_from_its_start_and_the_reasons_of_its_route(mesh: FakeMesh) -> None:
    async with served(mesh, make_page()) as http:
        found = (await http.get(f"/ui/api/traces/{TRACE_ID}")).json()
        missing = await http.get(f"/ui/api/traces/{'f' * 32}")
    assert (found["trace_id"], found["at"]) == (TRACE_ID, 1.0)
    assert [(span["name"], span["start_us"], span["end_us"]) for span in found["spans"]] == [
        ("chat tiny", 0, 100_000),
        ("frontend.route", 1000, 2000),
        ("decode.request", 3000, 99_000),
    ]
    assert found["spans"][1]["attributes"]["kvmesh.route.why"] == "fewest tokens queued"
    assert found["spans"][0]["events"][0]["at_us"] == 30_000
    assert missing.status_code == 404
    assert "not kept" in missing.json()["error"]["message"]


async def test_a_trace_is_a_file_for_perfetto(mesh: FakeMesh) -> None:
    async with served(mesh, make_page()) as http:
        answer = await http.get(f"/ui/api/traces/{TRACE_ID}/perfetto")
    assert answer.headers["content-disposition"] == 'attachment; filename="kvmesh-aaaaaaaaaaaa.json"'
    events = json.loads(answer.content)["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == [
        "chat tiny",
        "frontend.route",
        "decode.request",
    ]


async def test_an_unreadable_store_is_reported(mesh: FakeMesh) -> None:
    async with served(mesh, make_page(reader=FakeReader(fails=True))) as http:
        answer = await http.get("/ui/api/requests")
    assert answer.status_code == 503
    assert answer.json() == {"error": {"message": "memory cannot be read: it is gone"}}


async def test_a_worker_is_killed_from_this_machine_only_with_the_pages_own_header(mesh: FakeMesh) -> None:
    control = FakeControl()
    async with served(mesh, make_page(control=control)) as http:
        assert (await http.get("/ui/api/about")).json() == {"may_kill": True}
        order = {"instance": "d1"}
        refused: list[Any] = [
            await http.post("/ui/api/kill", json=order),
            await http.post("/ui/api/kill", json=order, headers={**OWN, "x-forwarded-for": "10.0.0.1"}),
            await http.post("/ui/api/kill", json=order, headers={**OWN, "origin": "https://evil.example"}),
            await http.post("/ui/api/kill", json=order, headers={**OWN, "origin": "http://127.0.0.1:1"}),
            await http.post("/ui/api/kill", content=b"{", headers=OWN),
            await http.post("/ui/api/kill", json={"instance": 3}, headers=OWN),
            await http.post("/ui/api/kill", json={}, headers=OWN),
            await http.post("/ui/api/kill", content=b"x" * 100_000, headers=OWN),
        ]
        assert [answer.status_code for answer in refused] == [400, 400, 403, 400, 400, 400, 400, 400]
        assert control.killed == []
        mine = {**OWN, "origin": str(http.base_url).rstrip("/")}
        assert (await http.post("/ui/api/kill", json=order, headers=mine)).json() == {"killed": "decode-0"}
        assert control.killed == ["d1"]
        behind = await http.get("/ui/api/about", headers={"x-forwarded-for": "10.0.0.1"})
        assert behind.json() == {"may_kill": False}


async def test_an_origin_that_may_ask_for_answers_may_not_kill(mesh: FakeMesh) -> None:
    """With `--cors-origins '*'` any site's page could have killed workers through a browser on the mesh's machine."""
    control = FakeControl()
    async with served(mesh, make_page(control=control), cors_origins="*") as http:
        headers = {**OWN, "origin": "https://evil.example"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.post("/ui/api/kill", json={"instance": "d1"}, headers=headers)).status_code == 400
    assert control.killed == []


async def test_without_a_control_no_instance_can_be_killed(mesh: FakeMesh) -> None:
    async with served(mesh, make_page()) as http:
        assert (await http.get("/ui/api/about")).json() == {"may_kill": False}
        answer = await http.post("/ui/api/kill", json={"instance": "d1"}, headers=OWN)
    assert answer.status_code == 400
    assert "services.local" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("client", "headers", "expected"),
    [
        (("127.0.0.1", 1), {}, True),
        (("::1", 1), {}, True),
        (("10.0.0.7", 1), {}, False),
        (("not an address", 1), {}, False),
        (None, {}, False),
        (("127.0.0.1", 1), {"via": "1.1 proxy"}, False),
        (("127.0.0.1", 1), {"forwarded": "for=10.0.0.7"}, False),
    ],
)
def test_who_counts_as_this_machine(client: tuple[str, int] | None, headers: dict[str, str], expected: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert is_from_this_machine(Request({"type": "http", "client": client, "headers": raw})) is expected
