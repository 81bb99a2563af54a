from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1 import trace_pb2

from services.observer.scopes import Unusual, scan_scope

IDS = {"trace_id": b"t" * 16, "span_id": b"s" * 8}
TIMES = {"start_time_unix_nano": 5, "end_time_unix_nano": 9}
texts = st.text(max_size=300)


@given(
    st.lists(st.tuples(texts, texts, st.binary(min_size=8, max_size=8), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(1, (1 << 64) - 1),
)
def test_spans_of_one_trace_are_counted_as_protobuf_reads_them(spans: list[tuple[Any, ...]], start_ns: int) -> None:
    scope = trace_pb2.ScopeSpans()
    scope.scope.name = "kvmesh"
    for name, state, parent, kind in spans:
        times = {**TIMES, "start_time_unix_nano": start_ns}
        span = scope.spans.add(**IDS, **times, name=name, trace_state=state, parent_span_id=parent, kind=kind)
        span.attributes.add(key=name).value.string_value = state
    assert scan_scope(scope.SerializeToString()) == (b"t" * 16, start_ns, len(spans))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{**IDS, **TIMES}, {**IDS, **TIMES, "trace_id": b"u" * 16}],
        [{**TIMES, "trace_id": b"t" * 16}],
        [{**TIMES, "trace_id": b"t" * 4, "span_id": b"s" * 8}],
        [{**IDS}],
        [{**IDS, "start_time_unix_nano": 5}],
        [{**IDS, "end_time_unix_nano": 5}],
    ],
)
def test_what_is_unusual_is_left_to_protobuf(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(Unusual):
        scan_scope(trace_pb2.ScopeSpans(spans=[trace_pb2.Span(**span) for span in spans]).SerializeToString())
