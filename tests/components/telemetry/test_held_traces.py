from time import time_ns
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from components.telemetry import held_traces
from components.telemetry.held_traces import HELD_NS, HeldTraces
from components.telemetry.light_span import LightSpan
from components.telemetry.spans import NOT_KEPT, Spans
from components.token_bucket import TokenBucket

S = 10**9


class Process:
    """A process's exported and announced spans."""

    def __init__(self, kept: TokenBucket | None = None) -> None:
        self.exported: list[LightSpan] = []
        self.announced: list[int] = []
        self.held = HeldTraces(self.exported.append, kept)
        self.held.announce_to(self.announced.append)
        self.tracer = Spans(self.held.take, TokenBucket(0), holds=True)

    @property
    def names(self) -> list[str]:
        return [step.name for span in self.exported for step in span.whole()]

    def begin(self, at_ns: int = S) -> LightSpan:
        root = self.tracer.start_span(
            "request", kind=SpanKind.SERVER, attributes={"kvmesh.request_id": "r"}, start_time=at_ns
        )
        assert isinstance(root, LightSpan)
        return root

    def step(self, root: LightSpan, at_ns: int = S) -> None:
        """Record a span of a request."""
        parent = root if root.sink == self.held.take else trace.NonRecordingSpan(root.get_span_context())
        self.tracer.start_span("step", trace.set_span_in_context(parent), start_time=at_ns).end(at_ns + 1)

    def request(self, seconds: float = 0.1, **attributes: Any) -> LightSpan:
        root = self.begin()
        self.step(root)
        root.set_attributes(attributes)
        root.end(S + int(seconds * S))
        return root


def test_beyond_the_limit_of_held_traces_requests_have_no_spans_and_calls_of_held_ones_have() -> None:
    process = Process()
    process.tracer.record_to(process.held.take, holds=True, held_per_s=0.1)  # and one at once
    root = process.begin()
    assert process.tracer.start_span("request", kind=SpanKind.SERVER) is NOT_KEPT
    process.step(root)
    root.set_status(StatusCode.ERROR)
    root.end(S + S)
    assert process.names == ["step", "request"]


def test_a_request_that_nothing_befell_is_not_exported() -> None:
    process = Process()
    process.request()
    process.request(**{"kvmesh.cancelled": "the client has gone"})
    assert (process.exported, process.announced) == ([], [])


def test_a_failed_request_is_exported_whole_and_announced() -> None:
    process = Process()
    root = process.begin()
    process.step(root)
    root.set_status(StatusCode.ERROR, "why")
    root.end()
    assert process.names == ["step", "request"]
    assert process.announced == [root.trace_id]


@pytest.mark.parametrize("mark", ["kvmesh.slow", "kvmesh.moved"])
def test_a_request_that_moved_or_was_slow_is_exported(mark: str) -> None:
    process = Process()
    root = process.request(**{mark: True})
    assert (process.names, process.announced) == (["step", "request"], [root.trace_id])


def test_another_process_exports_what_it_holds_once_the_decision_arrives() -> None:
    frontend, decode = Process(), Process()
    root, other = frontend.begin(), frontend.begin()
    for one in (root, other):
        decode.step(one)
    decode.held.keep([root.trace_id])
    assert [span.trace_id for span in decode.exported] == [root.trace_id]
    decode.step(root, time_ns())
    assert len(decode.exported) == 2  # what ends later follows at once


def test_requests_of_one_trace_are_kept_each_by_its_own_outcome() -> None:
    """A client may use one trace id for all requests: one that fails must not keep all."""
    process = Process()
    of_client = trace.set_span_in_context(trace.NonRecordingSpan(trace.SpanContext(7, 8, True, trace.TraceFlags(0))))
    good, bad = (
        process.tracer.start_span(name, of_client, SpanKind.SERVER, {"kvmesh.request_id": name})
        for name in ("good", "bad")
    )
    for name, root in (("step of good", good), ("step of bad", bad)):
        process.tracer.start_span(name, trace.set_span_in_context(root)).end()
    good.end()
    bad.set_status(StatusCode.ERROR, "why")
    bad.end()
    process.tracer.start_span("later", of_client, SpanKind.SERVER, {"kvmesh.request_id": "later"}).end()
    assert process.names == ["step of bad", "bad"]


def test_spans_of_one_trace_without_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_traces, "HELD_SPANS", 10)
    process, root = Process(), Process().begin()
    for _ in range(25):
        process.step(root)
    process.held.keep([root.trace_id])
    assert len(process.exported) == 5


def test_a_decision_is_forgotten_after_a_while() -> None:
    process, root = Process(), Process().begin()
    process.held.keep([root.trace_id])
    process.step(root, time_ns())
    process.step(root, time_ns() + 2 * held_traces.KEPT_NS)
    assert process.names == ["step"]


def test_a_sampled_trace_is_exported_at_its_end() -> None:
    process = Process()
    process.tracer.limit(TokenBucket(float("inf")))
    process.request()
    assert process.names == ["step", "request"]
    assert process.announced == []


def test_held_spans_are_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_traces, "HELD_SPANS", 10)
    process, caller = Process(), Process()
    first = caller.begin()
    process.step(first)
    later = caller.begin()
    process.step(later, 2 * S + HELD_NS)
    process.held.keep([first.trace_id])
    assert process.exported == []
    others = [caller.begin() for _ in range(20)]
    for other in others:
        process.step(other, 2 * S + HELD_NS)
    process.held.keep([later.trace_id])
    assert process.exported == []
    process.held.keep([other.trace_id for other in others])
    assert len(process.exported) == 10


def test_a_storm_of_failures_keeps_no_more_than_the_limit() -> None:
    process = Process(kept=TokenBucket(0.1, clock=lambda: 0.0))
    for _ in range(5):
        root = process.begin()
        process.step(root)
        root.set_status(StatusCode.ERROR, "why")
        root.end()
    assert (len(process.exported), len(process.announced)) == (1, 1)
    assert process.held.over_limit == 8, "four spans with a step each"
