"""Spans as Chrome's trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

Each process is a group of lanes. Spans that overlap without nesting are on different lanes, since a lane must nest.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from components.telemetry.trace_store import Span


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Times are microseconds of the wall clock."""
    by_service: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        by_service[span.service].append(span)
    events: list[dict[str, Any]] = []
    places: dict[str, tuple[int, int]] = {}  # of spans: process and lane
    for pid, (service, of_service) in enumerate(by_service.items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": service}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for span, lane in zip(of_service, _lanes(of_service), strict=True):
            places[span.span_id] = pid, lane
            events.append(_complete(span, pid, lane))
            events.extend(_instants(span, pid, lane))
    events.extend(_arrows(spans, places))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _lanes(spans: Sequence[Span]) -> list[int]:
    """A lane for each span; `spans` by start, the longest first."""
    open_until: list[list[int]] = []  # by lane: ends of the spans that are open there, innermost last
    lanes = []
    for span in spans:
        for ends in open_until:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
        free = (lane for lane, ends in enumerate(open_until) if not ends or ends[-1] >= span.end_ns)
        lane = next(free, len(open_until))
        if lane == len(open_until):
            open_until.append([])
        open_until[lane].append(span.end_ns)
        lanes.append(lane)
    return lanes


def _complete(span: Span, pid: int, lane: int) -> dict[str, Any]:
    args = {**span.attributes, "trace_id": span.trace_id, "span_id": span.span_id}
    if span.error:
        args["error"] = span.error
    return {
        "ph": "X",
        "name": span.name,
        "cat": "error" if span.status == "ERROR" else "span",
        "pid": pid,
        "tid": lane,
        "ts": span.start_ns / 1000,
        "dur": max(span.end_ns - span.start_ns, 0) / 1000,
        "args": args,
    }


def _instants(span: Span, pid: int, lane: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "i",
            "s": "t",
            "name": event.name,
            "pid": pid,
            "tid": lane,
            "ts": event.at_ns / 1000,
            "args": event.attributes,
        }
        for event in span.events
    ]


def _arrows(spans: Sequence[Span], places: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """From a span to its child in another process."""
    known = {span.span_id: span for span in spans}
    events: list[dict[str, Any]] = []
    for span in spans:
        parent = known.get(span.parent_id or "")
        if parent is None or parent.service == span.service:
            continue
        # an arrow begins within its slice, although another clock may say otherwise
        begin_ns = min(max(span.start_ns, parent.start_ns), parent.end_ns)
        for phase, of, at_ns in (("s", parent, begin_ns), ("f", span, span.start_ns)):
            pid, lane = places[of.span_id]
            arrow = {"ph": phase, "id": span.span_id, "name": "call", "cat": "call", "pid": pid, "tid": lane}
            events.append({**arrow, "ts": at_ns / 1000, **({"bp": "e"} if phase == "f" else {})})
    return events
