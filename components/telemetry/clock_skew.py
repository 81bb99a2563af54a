"""Corrects the times of a trace whose processes have different clocks.

A call cannot begin before its caller's span begins, nor after it ends. If the times contradict this, the called process's spans
are shifted equally, so that its earliest call begins with the caller's span. Network delay is unknown and shown as zero. A
smaller skew, which contradicts no call, is not corrected.
Source: Jaeger's clock-skew adjuster; here with one shift per process.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from components.telemetry.stored_spans import Span
from components.telemetry.trace_summary import root_of

SHIFT: Final = "kvmesh.clock_shift_ms"  # span attribute: shown time minus the process's own
TOLERATED_NS: Final = 1_000_000


def corrected(spans: Sequence[Span]) -> list[Span]:
    """One trace's spans by the clock of its root, sorted by start time. Shifted ones have the attribute SHIFT."""
    if not spans:
        return []
    shifts = _shifts(spans)
    if not any(shifts.values()):
        return list(spans)
    moved = [_moved(span, shift) if (shift := shifts.get(span.service, 0)) else span for span in spans]
    return sorted(moved, key=lambda span: (span.start_ns, -span.end_ns))


def shift_of(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds by shifted process."""
    return {span.service: span.attributes[SHIFT] for span in spans if SHIFT in span.attributes}


def _shifts(spans: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds to add to each process's times, found along the calls from the root's process."""
    by_id = {span.span_id: span for span in spans}
    calls: dict[tuple[str, str], list[tuple[Span, Span]]] = defaultdict(list)  # by processes of caller and called
    for span in spans:
        parent = by_id.get(span.parent_id or "")
        if parent is not None and parent.service != span.service:
            calls[parent.service, span.service].append((parent, span))
    shifts = {root_of(spans).service: 0}
    while True:
        reached = {called for caller, called in calls if caller in shifts and called not in shifts}
        if not reached:
            return shifts
        for service in reached:
            of_it = [(caller, pairs) for (caller, called), pairs in calls.items() if called == service]
            shifts[service] = _shift([(shifts[caller], *pair) for caller, p in of_it if caller in shifts for pair in p])


def _shift(calls: Sequence[tuple[int, Span, Span]]) -> int:
    """`calls` to one process: the caller's shift, the caller's span, the called span."""
    if not any(_is_impossible(*call) for call in calls):
        return 0
    return max(parent.start_ns + shift - child.start_ns for shift, parent, child in calls)


def _is_impossible(shift: int, parent: Span, child: Span) -> bool:
    """Return whether the times contradict the call. A failed caller may end before its call begins."""
    early_ns = parent.start_ns + shift - child.start_ns
    late_ns = child.start_ns - (parent.end_ns + shift)
    return early_ns > TOLERATED_NS or (late_ns > TOLERATED_NS and parent.status != "ERROR")


def _moved(span: Span, shift_ns: int) -> Span:
    return replace(
        span,
        start_ns=span.start_ns + shift_ns,
        end_ns=span.end_ns + shift_ns,
        attributes={**span.attributes, SHIFT: round(shift_ns / 1e6, 3)},
        events=tuple(replace(event, at_ns=event.at_ns + shift_ns) for event in span.events),
    )
