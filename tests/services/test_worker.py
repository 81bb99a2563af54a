"""What prefill and decode workers share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import services.worker
from bench.processes import free_port
from engine.config import EngineConfig
from engine.start import start_engine
from services.decode.config import DecodeSettings
from services.worker import open_worker
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_the_metrics_page_can_be_read_while_the_model_is_loaded(
    etcd_url: str,
    nats_url: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    answers: list[int] = []

    @asynccontextmanager
    async def load_slowly(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            answers.extend([(await client.get(path)).status_code for path in ("/metrics", "/health", "/ready")])
        async with start_engine(*args, **kwargs) as engine:
            yield engine

    monkeypatch.setattr(services.worker, "start_engine", load_slowly)
    settings = DecodeSettings(
        etcd_url=etcd_url,
        nats_url=nats_url,
        namespace=namespace,
        model="mock",
        state_dir=tmp_path,
        kv_transfer="fake",
        metrics_port=port,
        engine=EngineConfig(),
    )
    async with open_worker(settings, settings.engine, "decode") as worker:
        assert "starting  role=decode  model=mock" in capsys.readouterr().err, "the start of a worker was silent"
        assert answers == [200, 503, 503]
        pages = worker.metrics.pages()
        assert pages is not None, "the pages had no metric before the first step"
        assert pages.free == pages.total > 0
