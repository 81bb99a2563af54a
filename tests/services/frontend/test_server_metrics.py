"""OpenTelemetry's metrics of a server: a collector of ours receives and parses what is sent over OTLP."""

import ssl
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from components.certificates import TlsFiles
from components.errors import DecodeLost
from components.http.server import serve_http
from components.startup import WrongSettings
from components.text.tokenizer import TextModel
from services.frontend import server_metrics
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.server_metrics import send_server_metrics
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from tests.conftest import REPO
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.test_operations import CHAT, HELLO
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

Received = list[ExportMetricsServiceRequest]


@contextmanager
def collecting(certificate: TlsFiles | None = None) -> Iterator[tuple[str, Received]]:
    """A collector; with a `certificate`, over https."""
    received: Received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(str(certificate.certificate), str(certificate.key))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join()


@pytest.fixture
def collector() -> Iterator[tuple[str, Received]]:
    with collecting() as made:
        yield made


@pytest.fixture(autouse=True)
def a_collector_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "OTLP_TIMEOUT_S", int(PATIENCE_S))


def points(received: Received) -> dict[str, list[tuple[dict[str, str], int, float]]]:
    """Attributes, count and sum of each histogram."""
    [resource] = received[-1].resource_metrics
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("kvmesh-frontend", "f1")
    return {
        metric.name: [
            ({a.key: a.value.string_value for a in point.attributes}, point.count, point.sum)
            for point in metric.histogram.data_points
        ]
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.unit == "s"
    }


async def test_requests_reach_a_collector_under_the_names_of_the_conventions(
    collector: tuple[str, Received], mesh: FakeMesh, text: TextModel
) -> None:
    endpoint, received = collector
    settings = FrontendSettings(port=0, drain_timeout_s=2, otlp_endpoint=endpoint)
    mesh.pace_s = 0.002

    async def ask(http: httpx.AsyncClient, **changes: Any) -> int:
        return (await http.post(CHAT, json={**HELLO, **changes})).status_code

    async with send_server_metrics(settings, "f1", lambda: True) as server:
        app = create_app(mesh, text, settings, server_metrics=server)
        async with serve_http(app, settings) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            assert await ask(http) == 200
            assert await ask(http, model="invented") == 404
            num_deltas, mesh.fail_at, mesh.failure = mesh.deltas, 1, DecodeLost("gone")
            assert await ask(http) == 502
    shown = points(received)
    succeeded = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvmesh",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
    }
    durations = shown["gen_ai.server.request.duration"]
    assert [(about.get("error.type"), count) for about, count, _ in durations] == [
        (None, 1),
        ("UnknownModel", 1),
        ("DecodeLost", 1),
    ]
    assert durations[0][0] == succeeded
    assert "invented" not in str(durations)
    [(about, count, ttft_s)] = shown["gen_ai.server.time_to_first_token"]
    assert (about, count) == (succeeded, 1)
    [(about, count, each_s)] = shown["gen_ai.server.time_per_output_token"]
    assert (about, count) == (succeeded, 1)
    assert each_s == pytest.approx((durations[0][2] - ttft_s) / (num_deltas - 1), rel=1e-6)


async def test_without_a_collector_nothing_is_recorded() -> None:
    async with send_server_metrics(FrontendSettings(), "f1", lambda: True) as server:
        assert server is None


async def test_a_collector_behind_the_authority_of_the_mesh_is_trusted_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`requests` prefers REQUESTS_CA_BUNDLE to the file that OpenTelemetry's exporter gives it."""
    authority, stranger = Authority(tmp_path / "tls"), Authority(tmp_path / "stranger")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(stranger.ca))
    with collecting(authority.issue("collector", NAMES_OF_THIS_MACHINE)) as (url, received):
        settings = FrontendSettings(otlp_endpoint=url, tls=TlsFiles(ca=authority.ca))
        async with send_server_metrics(settings, "f1", lambda: True) as metrics:
            assert metrics is not None
            metrics.served("chat", "m", duration_s=1.0, ttft_s=0.5, num_tokens=3, error=None)
    assert "gen_ai.server.request.duration" in points(received)
    wrong = FrontendSettings(otlp_endpoint=url, tls=TlsFiles(ca=tmp_path / "none.pem"))
    with pytest.raises(WrongSettings, match=r"MESH_TLS__CA .*none\.pem: no PEM certificates"):
        async with send_server_metrics(wrong, "f1", lambda: True):
            pass


async def test_an_observer_gets_no_metrics(collector: tuple[str, Received]) -> None:
    endpoint, received = collector
    async with send_server_metrics(FrontendSettings(otlp_endpoint=endpoint), "f1", lambda: False) as server:
        assert server is not None
        server.served("chat", "m", duration_s=1.0, ttft_s=0.5, num_tokens=3, error=None)
    assert not received


@pytest.mark.parametrize("answer", [None, False, True])
async def test_metrics_of_a_receiver_that_has_not_answered_are_kept_until_it_is_known(
    collector: tuple[str, Received], answer: bool | None
) -> None:
    """An observer refused them again and again, and each refusal was logged as an error."""
    endpoint, received = collector
    wanted: list[bool | None] = [None]
    async with send_server_metrics(FrontendSettings(otlp_endpoint=endpoint), "f1", lambda: wanted[-1]) as server:
        assert server is not None
        server.served("chat", "m", duration_s=1.0, ttft_s=0.5, num_tokens=3, error=None)
        wanted.append(answer)
    assert bool(received) == bool(answer)
    assert not received or "gen_ai.server.request.duration" in points(received)


def test_the_exporter_is_a_dependency_of_the_project() -> None:
    """It was one of `dev` alone, so in an image a frontend with a collector ended at its start."""
    dependencies = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [name for name in dependencies if name.startswith("opentelemetry-exporter-otlp-proto-http")]
