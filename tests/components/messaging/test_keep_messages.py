import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from components.messaging.connection import connect_bus
from components.messaging.kept_traces import announce_kept, follow_kept, subject
from components.telemetry.held_traces import HeldTraces
from components.telemetry.light_span import LightSpan
from components.telemetry.spans import Spans
from components.token_bucket import TokenBucket
from tests.waiting import until

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
        for data in (b"", b"\xff" * 40, b"\x92\xa1x\x90"):  # foreign messages end nothing
            await bus.publish_bytes(subject(namespace), data)
        root = called_root(frontend, decode)
        assert not others
        root.set_status(StatusCode.ERROR, "why")
        root.end()
        await until(lambda: others)
    assert [span.name for span in (*own, *others)] == ["chat", "decode.request"]


async def test_a_frontend_that_leaves_announces_its_last_decisions(nats_url: str, namespace: str) -> None:
    """Requests that failed as it left were traced without the spans of other processes."""
    others: list[LightSpan] = []
    frontend, decode = HeldTraces(lambda _: None), HeldTraces(others.append)
    async with connect_bus(nats_url, "decode") as its_bus, follow_kept(its_bus, namespace, decode):
        async with connect_bus(nats_url, "frontend") as bus, announce_kept(bus, namespace, frontend):
            root = called_root(frontend, decode)
            root.set_status(StatusCode.ERROR, "this instance is leaving")
            root.end()
        await until(lambda: others)


def called_root(frontend: HeldTraces, decode: HeldTraces) -> trace.Span:
    """Return the frontend's span of a request, after decode's span has ended."""
    root = Spans(frontend.take, TokenBucket(0), holds=True).start_span(
        "chat", kind=SpanKind.SERVER, attributes={"kvmesh.request_id": "r"}
    )
    called = trace.set_span_in_context(trace.NonRecordingSpan(root.get_span_context()))
    Spans(decode.take, TokenBucket(0), holds=True).start_span("decode.request", called).end()
    return root
