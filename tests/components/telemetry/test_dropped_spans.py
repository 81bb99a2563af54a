import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler

from components.telemetry import spans
from components.telemetry.sampler import RateSampler
from components.telemetry.spans import Spans, record_span, trace_context, trace_headers

Kept = tuple[Spans, InMemorySpanExporter]
REMOTE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Spans of one trace, the first; later ones are dropped."""
    sampler: Sampler = RateSampler(0.1, clock=lambda: 0.0)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(sampler), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Spans(provider.get_tracer("test"))
    monkeypatch.setattr(spans, "tracer", tracer)
    return tracer, exporter


def request(tracer: Spans) -> tuple[str, str]:
    """One with a step, a step of another context and one that is over; returns the ids below and at the root."""
    with tracer.start_as_current_span("root") as root:
        with tracer.start_as_current_span("step") as step:
            step.set_attribute("a", 1)
            below = trace_headers()["traceparent"]
        elsewhere = tracer.start_span("elsewhere", context=trace.set_span_in_context(root))
        with trace.use_span(elsewhere, end_on_exit=True):
            record_span("over", 1)
        return below, f"{root.get_span_context().span_id:016x}"


def test_only_the_first_trace_is_kept_and_whole(kept: Kept) -> None:
    tracer, exporter = kept
    request(tracer)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["step", "over", "elsewhere", "root"]
    below, root = request(tracer)
    assert len(exporter.get_finished_spans()) == len(names)
    assert not int(below[-2:], 16) & trace.TraceFlags.SAMPLED
    assert root in below  # nobody made an id for the step


@pytest.mark.parametrize(("flags", "names"), [("00", []), ("01", ["handled"])])
def test_the_caller_decides_for_the_whole_trace(kept: Kept, flags: str, names: list[str]) -> None:
    tracer, exporter = kept
    token = context.attach(trace_context({"traceparent": REMOTE + flags}))
    try:
        with tracer.start_as_current_span("handled"):
            assert trace_headers()["traceparent"].startswith(REMOTE[:35])
    finally:
        context.detach(token)
    assert [span.name for span in exporter.get_finished_spans()] == names


def test_a_dropped_context_is_current_while_its_span_would_be(kept: Kept) -> None:
    tracer, _ = kept
    remote = trace_context({"traceparent": REMOTE + "00"})
    with tracer.start_as_current_span("root", context=remote):
        assert trace_headers()["traceparent"] == REMOTE + "00"
    assert trace_headers() == {}
