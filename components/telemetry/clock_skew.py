"""Corrects the times of a trace whose processes have clocks that differ.

A process cannot begin a call before its caller made it, nor after the caller has ended. Where the times say so, one of the
clocks is wrong. Then all spans of the called process are shifted by the same time, so that its earliest call begins with
the caller's span. The network's delay is unknown and shown as none. A smaller skew, which contradicts no call, stays.

Source: the clock-skew adjuster of Dapper's descendants, such as Jaeger; here with one shift for each process.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from components.telemetry.stored_spans import Span
from components.telemetry.trace_summary import root_of

SHIFT: Final = "kvmesh.clock_shift_ms"  # on each shifted span: shown time minus its own clock's
TOLERATED_NS: Final = 1_000_000  # clocks of one host differ by less: none


def corrected(spans: Sequence[Span]) -> list[Span]:
    """The spans of one trace by the clock of its root's process, by start time. Shifted ones have the attribute SHIFT."""
    if not spans:
        return []
    shifts = _shifts(spans)
    if not any(shifts.values()):
        return list(spans)
    moved = [_moved(span, shift) if (shift := shifts.get(span.service, 0)) else span for span in spans]
    return sorted(moved, key=lambda span: (span.start_ns, -span.end_ns))


def shift_of(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds by which each process was shifted, without those that were not."""
    return {span.service: span.attributes[SHIFT] for span in spans if SHIFT in span.attributes}


def _shifts(spans: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds to add to the times of each process, from the root's process along the calls."""
    by_id = {span.span_id: span for span in spans}
    calls: dict[tuple[str, str], list[tuple[Span, Span]]] = defaultdict(list)  # (caller, called) by their processes
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
    """`calls` of one process: the caller's shift, the caller's span, the called span."""
    if not any(_is_impossible(*call) for call in calls):
        return 0
    return max(parent.start_ns + shift - child.start_ns for shift, parent, child in calls)


def _is_impossible(shift: int, parent: Span, child: Span) -> bool:
    """A caller that failed may have ended first, since its call was late."""
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
