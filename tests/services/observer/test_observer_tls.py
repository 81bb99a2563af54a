"""The observer over TLS: real certificates, a real process, our sender and reader."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from components.certificates import TlsFiles
from components.settings import MeshSettings
from components.telemetry.otlp_sender import OtlpSender
from components.telemetry.span_export import SpanExport
from components.telemetry.spans import Spans
from components.telemetry.trace_reader import (
    LocalTraceReader,
    ObserverTraceReader,
    TracesUnavailable,
    open_trace_reader,
)
from components.telemetry.trace_store import TraceWriter
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority

RunService = Callable[..., Any]
TOKEN = "t0ken"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


def start(run_service: RunService, home: Path, files: TlsFiles) -> str:
    """Start an observer; return its URL with the token."""
    env = {
        "MESH_OBSERVER_PORT": "0",
        "MESH_OBSERVER_TOKEN": TOKEN,
        "MESH_OBSERVER_TLS_CERT": str(files.certificate),
        "MESH_OBSERVER_TLS_KEY": str(files.key),
        "MESH_STATE_DIR": str(home),
        "MESH_LOG_FORMAT": "json",
    }
    process = run_service("services.observer", env=env)
    process.wait_for_log('"ready"')
    ready = next(line for line in process.logged().splitlines() if '"ready"' in line)
    url = str(json.loads(ready)["url"])
    assert url.startswith("https://")
    return url.replace("https://", f"https://any:{TOKEN}@")


def send(url: str, ca: Path | None, home: Path) -> SpanExport:
    """Export one span, like a process that ends."""
    exporting = SpanExport("frontend-f1", {"service.name": "kvmesh-frontend"}, TraceWriter(home), OtlpSender(url, ca))
    exporting.start()
    Spans(exporting.put).start_span("chat", kind=SpanKind.SERVER, attributes={"kvmesh.request_id": "r1"}).end()
    exporting.stop()
    return exporting


def test_spans_are_sent_and_read_over_tls_with_the_authority_of_the_mesh(
    run_service: RunService, authority: Authority, tmp_path: Path
) -> None:
    url = start(run_service, tmp_path / "observer", authority.issue("observer", NAMES_OF_THIS_MACHINE))
    home = tmp_path / "process"
    assert set(send(url, authority.ca, home).dropped.values()) == {0}
    assert LocalTraceReader(home).listed() == [], "an observer that answers keeps the spans"
    reader = open_trace_reader(MeshSettings(otlp_endpoint=url, state_dir=home, tls=TlsFiles(ca=authority.ca)))
    assert isinstance(reader, ObserverTraceReader)
    assert [trace.request_id for trace in reader.listed()] == ["r1"]
    assert [span.name for span in reader.spans("r1")] == ["chat"]
    assert TOKEN not in reader.place


def test_the_command_reads_traces_over_tls(run_service: RunService, authority: Authority, tmp_path: Path) -> None:
    url = start(run_service, tmp_path / "observer", authority.issue("observer", NAMES_OF_THIS_MACHINE))
    send(url, authority.ca, tmp_path / "process")
    env = {"MESH_OTLP_ENDPOINT": url, "MESH_TLS__CA": str(authority.ca), "MESH_STATE_DIR": str(tmp_path / "else")}
    listing = run_service("services.inspect", "traces", "--json", env=env)
    assert listing.exit_code() == 0, listing.logged()
    assert [one["request_id"] for one in json.loads(listing.logged())["traces"]] == ["r1"]


def test_an_observer_that_another_authority_signed_gets_nothing(
    run_service: RunService, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path / "stranger")
    url = start(run_service, tmp_path / "observer", stranger.issue("observer", NAMES_OF_THIS_MACHINE))
    for ca in (authority.ca, None):  # None: the system's authorities
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert send(url, ca, tmp_path / "process").dropped["receiver_away"] == 1
        [cause] = [vars(record)["cause"] for record in caplog.records if "receiver unreachable" in record.message]
        assert "certificate verify failed" in cause
        with pytest.raises(TracesUnavailable, match="certificate verify failed"):
            ObserverTraceReader(url, ca).listed()
    assert ObserverTraceReader(url, stranger.ca).listed() == []


def test_a_certificate_for_another_host_is_refused(
    run_service: RunService, authority: Authority, tmp_path: Path
) -> None:
    url = start(run_service, tmp_path / "observer", authority.issue("observer", ["elsewhere.example"]))
    with pytest.raises(TracesUnavailable, match=r"not valid for '127\.0\.0\.1'"):
        ObserverTraceReader(url, authority.ca).listed()
    assert send(url, authority.ca, tmp_path / "process").dropped["receiver_away"] == 1


def test_a_missing_file_of_authorities_is_named(run_service: RunService, authority: Authority, tmp_path: Path) -> None:
    url = start(run_service, tmp_path / "observer", authority.issue("observer", NAMES_OF_THIS_MACHINE))
    with pytest.raises(TracesUnavailable, match=r"none\.pem: no PEM certificates can be read there"):
        ObserverTraceReader(url, tmp_path / "none.pem").listed()


def test_a_renewed_authority_is_trusted_from_the_next_connection_on(
    run_service: RunService, authority: Authority, tmp_path: Path
) -> None:
    new = Authority(tmp_path / "new")
    url = start(run_service, tmp_path / "observer", new.issue("observer", NAMES_OF_THIS_MACHINE))
    reader = ObserverTraceReader(url, authority.ca)
    with pytest.raises(TracesUnavailable):
        reader.listed()
    authority.ca.write_bytes(new.ca.read_bytes())
    assert reader.listed() == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"TLS_CERT": "observer.pem"}, "tls_cert and tls_key belong together: set both"),
        ({"TLS_CERT": "none.pem", "TLS_KEY": "none.key"}, "--tls-cert none.pem: No such file or directory"),
    ],
)
def test_wrong_files_end_the_observer_with_one_line(
    run_service: RunService, tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    env = {f"MESH_OBSERVER_{name}": value for name, value in settings.items()}
    process = run_service("services.observer", env={**env, "MESH_STATE_DIR": str(tmp_path), "MESH_OBSERVER_PORT": "0"})
    assert process.exit_code() == 78
    [line] = process.logged().splitlines()
    assert said in line
