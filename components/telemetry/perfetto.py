"""Converts a trace to Chrome's trace events, for ui.perfetto.dev and chrome://tracing.

Source: "Trace Event Format" of Chromium. Times are microseconds since the trace began.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from components.telemetry.stored_spans import Span

CATEGORY: Final = "kvmesh"


def trace_events(spans: Sequence[Span]) -> dict[str, Any]:
    """`spans`: one or more of one trace. Calls between processes are arrows."""
    began_ns = min(span.start_ns for span in spans)
    pids = {service: number for number, service in enumerate(dict.fromkeys(s.service for s in spans), 1)}
    lanes = _lanes(spans)
    by_id = {span.span_id: span for span in spans}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": service}}
        for service, pid in pids.items()
    ]

    def place(span: Span, at_ns: int) -> dict[str, Any]:
        at_us = (at_ns - began_ns) / 1000
        return {"cat": CATEGORY, "ts": at_us, "pid": pids[span.service], "tid": lanes[span.span_id]}

    for span in spans:
        facts = {**span.attributes, "span_id": span.span_id, **({"error": span.error} if span.error else {})}
        duration_us = max(0, span.end_ns - span.start_ns) / 1000
        events.append({"ph": "X", "name": span.name, **place(span, span.start_ns), "dur": duration_us, "args": facts})
        events += [
            {"ph": "i", "s": "t", "name": event.name, **place(span, event.at_ns), "args": event.attributes}
            for event in span.events
        ]
        parent = by_id.get(span.parent_id or "")
        if parent is not None and parent.service != span.service:
            arrow = {"name": "call", "id": int(span.span_id, 16) & 0x7FFF_FFFF}
            events.append(
                {"ph": "s", **arrow, **place(parent, max(parent.start_ns, min(span.start_ns, parent.end_ns)))}
            )
            events.append({"ph": "f", "bp": "e", **arrow, **place(span, span.start_ns)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"trace_id": spans[0].trace_id}}


def _lanes(spans: Sequence[Span]) -> dict[str, int]:
    """Return a thread number for each span, because spans of one thread must be nested or disjoint."""
    found: dict[str, int] = {}
    open_ends: dict[str, list[list[int]]] = defaultdict(list)  # of enclosing spans, by process and lane
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        found[span.span_id] = 1 + _take_lane(open_ends[span.service], span)
    return found


def _take_lane(lanes: list[list[int]], span: Span) -> int:
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= span.start_ns:
            ends.pop()
        if not ends or span.end_ns <= ends[-1]:
            ends.append(span.end_ns)
            return number
    lanes.append([span.end_ns])
    return len(lanes) - 1
