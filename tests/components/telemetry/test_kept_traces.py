from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from components.telemetry import spans
from components.telemetry.spans import Spans, record_step, trace_context, trace_headers
from components.token_bucket import TokenBucket

Kept = tuple[Spans, InMemorySpanExporter]
REMOTE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Keep the spans of the first trace only."""
    exporter = InMemorySpanExporter()
    tracer = Spans(lambda span: exporter.export(list(span.whole())), TokenBucket(0.1, clock=lambda: 0.0))
    monkeypatch.setattr(spans, "tracer", tracer)
    return tracer, exporter


@contextmanager
def inside(caller: context.Context) -> Iterator[None]:
    token = context.attach(caller)
    try:
        yield
    finally:
        context.detach(token)


def request(tracer: Spans) -> dict[str, str] | None:
    """Record a request with three steps; return the headers of a message from one."""
    with tracer.start_as_current_span("root") as root:
        with tracer.start_as_current_span("step") as step:
            step.set_attribute("a", 1)
            headers = trace_headers()
        elsewhere = tracer.start_span("elsewhere", context=trace.set_span_in_context(root))
        with trace.use_span(elsewhere, end_on_exit=True):
            record_step("over", 1)
        return headers


def test_only_the_first_trace_is_kept_and_whole(kept: Kept) -> None:
    tracer, exporter = kept
    assert request(tracer)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["step", "over", "elsewhere", "root"]
    assert request(tracer) is None
    assert len(exporter.get_finished_spans()) == len(names)


def test_one_that_is_not_kept_is_over_with_its_root(kept: Kept) -> None:
    tracer, exporter = kept
    request(tracer)
    request(tracer)
    with tracer.start_as_current_span("next", context=trace_context({"traceparent": f"{REMOTE}01"})):
        assert trace_headers()
    assert exporter.get_finished_spans()[-1].name == "next"


@pytest.mark.parametrize("flags", ["01", "03"])
def test_what_a_caller_keeps_is_kept(kept: Kept, flags: str) -> None:
    tracer, exporter = kept
    request(tracer)
    exporter.clear()
    with inside(trace_context({"traceparent": REMOTE + flags})), tracer.start_as_current_span("handled"):
        headers = trace_headers()
    assert headers is not None
    assert headers["traceparent"].startswith(REMOTE[:35])
    assert [span.name for span in exporter.get_finished_spans()] == ["handled"]


@pytest.mark.parametrize(
    "headers", [None, {}, {"x-of-nats": "1"}, {"traceparent": f"{REMOTE}00"}, {"traceparent": f"{REMOTE}02"}]
)
def test_what_a_caller_does_not_keep_is_not_kept(kept: Kept, headers: dict[str, str] | None) -> None:
    tracer, exporter = kept
    with inside(trace_context(headers)), tracer.start_as_current_span("handled"):
        assert trace_headers() is None
    assert not exporter.get_finished_spans()


def test_a_bad_traceparent_begins_a_trace_as_the_rate_allows(kept: Kept) -> None:
    tracer, exporter = kept
    for name in ("first", "second"):
        with inside(trace_context({"traceparent": "bad"})), tracer.start_as_current_span(name):
            pass
    assert [span.name for span in exporter.get_finished_spans()] == ["first"]


def test_a_process_that_keeps_nothing_passes_on_what_its_caller_keeps() -> None:
    tracer = Spans()
    with inside(trace_context({"traceparent": f"{REMOTE}01"})), tracer.start_as_current_span("handled"):
        headers = trace_headers()
    assert headers == {"traceparent": f"{REMOTE}01"}
    with tracer.start_as_current_span("its own"):
        assert trace_headers() is None


def test_the_rate_decides_whether_the_trace_that_a_client_names_is_kept(kept: Kept) -> None:
    """A client that sent the same sampled `traceparent` with each request had all of them traced, at any rate."""
    tracer, exporter = kept
    for _ in range(3):
        context_of_client = tracer.continue_trace({"traceparent": f"{REMOTE}01"})
        with tracer.start_as_current_span("root", context=context_of_client):
            pass
    [span] = exporter.get_finished_spans()
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" in REMOTE
