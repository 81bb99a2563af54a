"""Which store of traces `/ui` reads, when an observer is away for a while."""

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
