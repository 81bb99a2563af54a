"""Spans that a process drops are counted by the cause, which has few values."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from components.telemetry import otlp_sender, span_export
from components.telemetry.held_traces import HeldTraces
from components.telemetry.otlp_sender import OtlpSender
from components.telemetry.span_export import SpanExport
from components.telemetry.spans import Spans
from components.telemetry.telemetry import Telemetry
from components.telemetry.trace_file import FILE_NAME
from components.telemetry.trace_pieces import REQUEST_ID
from components.telemetry.trace_store import TraceStore, TraceWriter
from components.token_bucket import TokenBucket

NOBODY = "http://127.0.0.1:1"
NONE = {"export_slow": 0, "file": 0, "receiver_away": 0, "receiver_refused": 0}


@contextmanager
def receiver(status: int) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def exported(home: Path, endpoint: str | None, *batches: int) -> dict[str, int]:
    """Return the drops of a process that exports these batches."""
    export = SpanExport("a-1", {}, TraceWriter(home), None if endpoint is None else OtlpSender(endpoint))
    tracer = Spans(export.put)
    for count in batches:
        for number in range(count):
            tracer.start_span(f"span {number}").end()
        export.export()
    return dict(export.dropped)


def test_none_is_dropped_while_all_works(tmp_path: Path) -> None:
    with receiver(200) as endpoint:
        assert exported(tmp_path, endpoint, 3) == NONE
    assert exported(tmp_path, None, 3) == NONE


def test_failures_beyond_the_limit_of_the_tail_are_tail_limit(tmp_path: Path) -> None:
    """With many failures most traces were lost, and no metric showed it."""
    export = SpanExport("a-1", {}, TraceWriter(tmp_path))
    telemetry = Telemetry(HeldTraces(export.put, TokenBucket(0.1, clock=lambda: 0.0)), export)
    tracer = Spans(telemetry.held.take, TokenBucket(0), holds=True)
    for number in range(4):
        root = tracer.start_span("request", None, SpanKind.SERVER, {REQUEST_ID: str(number)})
        root.set_status(StatusCode.ERROR)
        root.end()
    assert telemetry.dropped == {**NONE, "tail_limit": 3}


def test_spans_beyond_what_waits_for_the_export_are_export_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "MAX_WAITING", 10)
    assert exported(tmp_path, None, 13) == {**NONE, "export_slow": 3}


def test_spans_beyond_what_waits_for_a_receiver_that_is_away_are_receiver_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_sender, "WAITING_BYTES", 100)
    assert exported(tmp_path, NOBODY, 2, 4, 1) == {**NONE, "receiver_away": 6}, "the latest request still waits"


def test_spans_that_the_receiver_refuses_are_receiver_refused(tmp_path: Path) -> None:
    with receiver(401) as endpoint:
        assert exported(tmp_path, endpoint, 2, 3) == {**NONE, "receiver_refused": 5}


def test_a_header_that_cannot_be_sent_costs_the_file_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The export failed before it wrote the file, and showed the header in the log."""
    for value in ("key=sec%0Aret", "key=sec%E2%82%ACret"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", value)
        with receiver(200) as endpoint:
            assert exported(tmp_path, endpoint, 2, 3) == NONE
    assert len(TraceStore(tmp_path).last_trace_ids()) == 10
    assert "OTLP receiver unreachable, spans are queued" in caplog.messages
    assert not any("ret" in str(record.__dict__) for record in caplog.records)


def test_a_process_without_spans_does_not_log_a_receiver_that_is_away_or_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver(401) as refusing:
        for endpoint in (NOBODY, refusing):
            export = SpanExport("a-1", {}, TraceWriter(tmp_path), OtlpSender(endpoint))
            export.start()
            export.stop()
            assert export.dropped == NONE
    assert not caplog.records


def test_spans_that_the_file_does_not_take_are_file(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert exported(tmp_path, None, 4) == {**NONE, "file": 4}
