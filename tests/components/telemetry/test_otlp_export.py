"""With an endpoint, spans are also sent over OTLP/HTTP, to a collector of the test."""

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from components.telemetry.trace_store import TraceStore
from tests.waiting import PATIENCE_S

PROGRAM = """
import asyncio, sys
from components.settings import MeshSettings
from components.telemetry.spans import tracer
from components.telemetry.telemetry import start_telemetry

async def main():
    settings = MeshSettings(otlp_endpoint=sys.argv[1], state_dir=sys.argv[2])
    async with start_telemetry(settings, "decode", "abc"):
        with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
            pass

asyncio.run(main())
"""


def test_spans_reach_a_collector_and_the_disk(tmp_path: Path) -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}/"
        # in its own process, since OpenTelemetry's provider is set only once
        subprocess.run([sys.executable, "-c", PROGRAM, endpoint, str(tmp_path)], check=True, timeout=PATIENCE_S)
        server.shutdown()
        thread.join()
    [resource] = [r for request in received for r in request.resource_spans]
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "kvmesh-decode"
    assert attributes["service.instance.id"] == "abc"
    sent = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert sent["inner"].parent_span_id == sent["outer"].span_id
    store = TraceStore(tmp_path)
    kept = store.trace(store.last_trace_ids(1)[0])
    assert {s.span_id for s in kept} == {s.span_id.hex() for s in sent.values()}


def test_a_collector_that_is_away_costs_nothing_but_its_spans(tmp_path: Path) -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, "http://127.0.0.1:1", str(tmp_path), stderr=asyncio.subprocess.DEVNULL
        )
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    asyncio.run(run())
    assert len(TraceStore(tmp_path).trace(TraceStore(tmp_path).last_trace_ids(1)[0])) == 2
