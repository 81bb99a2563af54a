"""Which store of traces `/ui` reads, when an observer is away for a while; and traces of many requests."""

from contextlib import closing
from pathlib import Path

import pytest

from bench.processes import free_port
from components.http.server import serve_http
from components.settings import MeshSettings
from components.telemetry.trace_reader import TracesUnavailable
from services.frontend.ui import traces
from services.frontend.ui.traces import Traces
from services.observer.app import ObserverApp
from services.observer.config import ObserverSettings
from tests.loop_gap import MAX_GAP_S, longest_gap
from tests.services.frontend.fake_mesh import FakeMesh
from tests.services.frontend.ui.parts import LONG_ID, FakeReader, long_trace, make_page, served

pytestmark = pytest.mark.anyio


async def test_an_observer_that_was_away_is_read_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page showed the local file, into which nothing was written any more, until the frontend started again."""
    monkeypatch.setattr(traces, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(traces, "LIST_KEPT_S", 0.0)
    port = free_port()
    place = f"http://127.0.0.1:{port}"
    shown = Traces(MeshSettings(otlp_endpoint=place, state_dir=tmp_path / "frontend"))
    assert (await shown.listed("recent"))["place"] != place
    settings = ObserverSettings(port=port, state_dir=tmp_path / "observer")
    with closing(ObserverApp(settings)) as app:
        async with serve_http(app, settings):
            assert (await shown.listed("recent"))["place"] == place
    with pytest.raises(TracesUnavailable):  # instead of what the local file has of long ago
        await shown.listed("recent")


@pytest.mark.parametrize("form", ["", "/perfetto"])
async def test_a_trace_of_many_requests_does_not_block_the_event_loop(mesh: FakeMesh, form: str) -> None:
    """All of its spans were corrected, filtered and encoded in the event loop: 2 s for 48,000."""
    reader = FakeReader([long_trace(16_000)])
    async with served(mesh, make_page(reader=reader)) as http, longest_gap() as gap:
        answer = await http.get(f"/ui/api/traces/{LONG_ID}{form}")
    assert answer.status_code == 200
    assert gap[0] < MAX_GAP_S, gap


async def test_of_a_trace_of_many_requests_the_first_spans_are_shown_and_the_others_counted(mesh: FakeMesh) -> None:
    reader = FakeReader([long_trace(1000)])
    async with served(mesh, make_page(reader=reader)) as http:
        found = (await http.get(f"/ui/api/traces/{LONG_ID}")).json()
    assert (len(found["spans"]), found["left_out"]) == (2000, 1000)
    assert found["spans"][-1]["start_us"] == 666_001_000
