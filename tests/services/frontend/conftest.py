from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from components.http.server import serve_http
from components.structured.checker import ConstraintChecker, open_checker
from components.structured.metrics import ConstraintMetrics
from components.telemetry.spans import Spans
from components.text.tokenizer import TextModel
from engine.model.mock_model import mock_dir
from services.frontend import tracing
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.components.text.tiny_model import tiny_text_model
from tests.services.frontend.fake_mesh import FakeMesh
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def text() -> TextModel:
    return tiny_text_model()


@pytest.fixture
def mesh(text: TextModel) -> FakeMesh:
    return FakeMesh(text)


@pytest.fixture
def settings() -> FrontendSettings:
    return FrontendSettings(port=0, drain_timeout_s=2, max_body_bytes=64 * 1024)


@pytest.fixture
async def url(mesh: FakeMesh, text: TextModel, settings: FrontendSettings) -> AsyncIterator[str]:
    """A frontend over the fake mesh behind a real server."""
    async with serve_http(create_app(mesh, text, settings), settings) as listening:
        yield listening


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
async def refusing(text: TextModel) -> AsyncIterator[tuple[httpx.AsyncClient, FakeMesh]]:
    """One frontend for all bad requests of a module, and the mesh that they may not reach."""
    mesh, settings = FakeMesh(text), FrontendSettings(port=0, drain_timeout_s=2)
    async with (
        serve_http(create_app(mesh, text, settings), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        yield http, mesh


@pytest.fixture(scope="module")
async def checker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ConstraintChecker]:
    folder = mock_dir(tmp_path_factory.mktemp("models"))
    async with open_checker(folder, 2.0, ConstraintMetrics(CollectorRegistry())) as opened:
        yield opened


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    """The package as users have it, retries off."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of requests go."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "tracer", Spans(lambda span: exporter.export(list(span.whole()))))
    return exporter
