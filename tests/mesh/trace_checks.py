"""Checks of a trace: each span has its parent, and the phases cover the time."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from components.telemetry.stored_spans import Span
from components.telemetry.trace_pieces import LOST
from components.telemetry.trace_reader import LocalTraceReader
from components.telemetry.trace_store import TraceStore
from components.telemetry.trace_summary import root_of
from tests.waiting import wait_until

COVERED: Final = 0.98
MANY: Final = 1000  # more traces than a test makes
CALLS: Final = {"frontend.dispatch"}  # spans that have children
TRIES: Final = 4  # a busy machine may take the processor away between two phases


def whole_trace(home: Path, request_id: str, names: Collection[str]) -> list[Span]:
    """Wait for the spans `names` and all parents; return all spans."""
    spans: list[Span] = []

    def is_whole() -> bool:
        spans[:] = LocalTraceReader(home).spans(request_id)
        return bool(spans) and not orphans(spans) and names_of(spans) >= set(names)

    def what() -> str:
        missing = sorted(set(names) - names_of(spans))
        return f"missing: {missing}; without parent: {orphans(spans)}; found: {sorted(names_of(spans))}"

    wait_until(is_whole, what)  # each process exports its own spans
    return spans


def traces_since(home: Path, began_ns: int, count: int, names: Collection[str]) -> list[list[Span]]:
    """Wait for `count` traces that began since then and have the spans `names`."""
    store = TraceStore(home)
    found: list[list[Span]] = []
    complete: list[list[Span]] = []

    def are_complete() -> bool:
        traces = store.traces(store.last_trace_ids(MANY)).values()
        found[:] = [spans for spans in traces if spans and spans[0].start_ns >= began_ns]
        complete[:] = [spans for spans in found if names_of(spans) >= set(names)]
        return len(complete) >= count

    wait_until(are_complete, lambda: f"{count} with {names}: {[sorted(names_of(spans)) for spans in found]}")
    return complete


def names_of(spans: list[Span]) -> set[str]:
    return {span.name for span in spans}


def orphans(spans: list[Span]) -> list[str]:
    known, root = {span.span_id for span in spans}, root_of(spans) if spans else None
    return [span.name for span in spans if span.parent_id not in known and span is not root]


def uncovered(spans: list[Span]) -> dict[str, float]:
    """Return the uncovered shares of the time to first token and of the whole time, if too large.

    Phases are spans without children, calls, which include the way of their message, and spans of a process that died with
    its phases.
    """
    root = root_of(spans)
    ends = {"E2E": root.end_ns}
    if "kvmesh.ttft_s" in root.attributes:
        ends["TTFT"] = root.start_ns + int(root.attributes["kvmesh.ttft_s"] * 1e9)
    parents = {span.parent_id for span in spans}
    phases = (span for span in spans if span.span_id not in parents or span.name in CALLS or LOST in span.attributes)
    leaves = sorted(phases, key=lambda span: span.start_ns)
    shares = {}
    for name, end_ns in ends.items():
        covered, reached = 0, root.start_ns
        for leaf in leaves:
            start, end = max(leaf.start_ns, reached), min(leaf.end_ns, end_ns)
            if end > start:
                covered += end - start
                reached = end
        shares[name] = 1 - covered / (end_ns - root.start_ns)
    return {name: share for name, share in shares.items() if share > 1 - COVERED}


def covered_trace(ask: Callable[[], str], home: Path, names: Collection[str]) -> list[Span]:
    """Return the trace of a request whose phases cover its time. `ask` sends it and returns its id."""
    for _ in range(TRIES):
        spans = whole_trace(home, ask(), names)
        missing = uncovered(spans)
        if not missing:
            return spans
    raise AssertionError(f"not covered: {missing}\n{shown(spans)}")


def shown(spans: list[Span]) -> str:
    began_ns = min(span.start_ns for span in spans)
    times = ((s.name, (s.start_ns - began_ns) / 1e6, (s.end_ns - began_ns) / 1e6) for s in spans)
    return "\n".join(f"{name:25} {start:9.2f} {end:9.2f}" for name, start, end in times)
