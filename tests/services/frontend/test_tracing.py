import contextvars
import math
from typing import Any

import pytest
from opentelemetry import trace

from components.token_bucket import TokenBucket
from services.frontend import tracing
from tests.components.telemetry.test_kept_traces import REMOTE, Kept, kept

__all__ = ["kept"]

SCOPE: dict[str, Any] = {"path": "/v1/chat/completions", "headers": []}


def test_a_request_that_began_within_another_one_is_not_part_of_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP server begins a pipelined request in the context of the one before it."""
    tracer, exporter = kept
    tracer.limit(TokenBucket(math.inf))
    monkeypatch.setattr(tracing, "tracer", tracer)
    behind = []
    with tracing.begin_timeline(SCOPE, "chat", "one", "", ""):
        behind.append(contextvars.copy_context())
    with tracing.begin_timeline(SCOPE, "chat", "two", "", ""):
        behind.append(contextvars.copy_context())

    def begin(trace_id: str) -> trace.Span:
        caller = {**SCOPE, "headers": [(b"traceparent", f"00-{trace_id}-00f067aa0ba902b7-01".encode())]}
        with tracing.begin_timeline(caller, "chat", "three", "", "") as timeline:
            return timeline.root

    def begin_one_more() -> trace.Span:
        with tracing.begin_timeline(SCOPE, "chat", "four", "", "") as timeline:
            return timeline.root

    of_caller = REMOTE.split("-")[1]
    for context in behind:
        assert f"{context.run(begin, of_caller).get_span_context().trace_id:032x}" == of_caller
        context.run(begin_one_more)
    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert [(span.attributes or {})["kvmesh.request_id"] for span in roots] == ["one", "two", "four", "four"]
