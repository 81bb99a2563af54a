import asyncio

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from components.messaging.bus import connect_bus
from components.messaging.kept_traces import announce_kept, follow_kept, subject
from components.telemetry.held_traces import HeldTraces
from components.telemetry.light_span import LightSpan
from components.telemetry.spans import Spans, TraceRate

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]


async def test_the_frontends_decision_lets_another_process_export_what_it_holds(nats_url: str, namespace: str) -> None:
    own: list[LightSpan] = []
    others: list[LightSpan] = []
    frontend, decode = (HeldTraces(sink.append) for sink in (own, others))
    async with (
        connect_bus(nats_url, "test") as bus,
        follow_kept(bus, namespace, decode),
        announce_kept(bus, namespace, frontend),
    ):
        for data in (b"", b"\xff" * 40, b"\x92\xa1x\x90"):  # what a stranger sends ends nothing
            await bus.publish_bytes(subject(namespace), data)
        root = Spans(frontend.take, TraceRate(0), holds=True).start_span(
            "chat", kind=SpanKind.SERVER, attributes={"kvmesh.request_id": "r"}
        )
        called = trace.set_span_in_context(trace.NonRecordingSpan(root.get_span_context()))
        Spans(decode.take, TraceRate(0), holds=True).start_span("decode.request", called).end()
        assert not others
        root.set_status(StatusCode.ERROR, "why")
        root.end()
        async with asyncio.timeout(20):
            while not others:
                await asyncio.sleep(0.01)
    assert [span.name for span in (*own, *others)] == ["chat", "decode.request"]
