"""Traces of hosts whose clocks differ."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from components.telemetry.clock_skew import SHIFT, corrected, shift_of
from components.telemetry.perfetto import trace_events
from components.telemetry.stored_spans import Event, Span
from services.inspect.trace_view import trace_table

MS = 1_000_000
HOUR = 3_600_000
BEGAN = 1_700_000_000_000_000_000


def span(name: str, parent: str | None, service: str, start_ms: float, end_ms: float, status: str = "UNSET") -> Span:
    start, end = (BEGAN + int(at * MS) for at in (start_ms, end_ms))
    facts = {"kvmesh.request_id": "r"} if parent is None else {}
    around = None if parent is None else parent.encode().hex()
    return Span("f" * 32, name.encode().hex(), around, service, name, start, end, status, facts)


# Decode outlasts the frontend's call, and calls prefill.
TRACE = [
    span("chat", None, "frontend-1", 0, 110),
    span("dispatch", "chat", "frontend-1", 1, 2.1),
    span("decode", "dispatch", "decode-1", 1.5, 109),
    span("prefill", "decode", "prefill-1", 2.5, 28),
    span("compute", "prefill", "prefill-1", 3, 27),
    span("open", "decode", "bootstrap-1", 3.6, 3.7),
    span("bootstrap", "prefill", "prefill-1", 2.6, 4),
]


def skewed(**ahead_ms: float) -> list[Span]:
    """Return the trace of processes whose clocks are ahead."""
    found = []
    for one in TRACE:
        ns = int(ahead_ms.get(one.service.partition("-")[0], 0) * MS)
        events = (Event("e", one.start_ns + ns, {}),)
        found.append(replace(one, start_ns=one.start_ns + ns, end_ns=one.end_ns + ns, events=events))
    return sorted(found, key=lambda one: (one.start_ns, -one.end_ns))


def starts(spans: list[Span]) -> dict[str, float]:
    return {one.name: (one.start_ns - BEGAN) / MS for one in spans}


def test_a_trace_of_one_clock_stays_as_it_is() -> None:
    assert corrected(skewed()) == skewed()
    assert corrected([]) == []


@pytest.mark.parametrize("ahead_ms", [5000, -5000, HOUR, -HOUR])
def test_a_process_with_another_clock_is_shifted_as_a_whole_to_its_caller(ahead_ms: float) -> None:
    found = corrected(skewed(prefill=ahead_ms))
    at = starts(found)
    assert at["prefill"] == 1.5, "with decode's request: the network's delay is unknown"
    assert (at["compute"] - at["prefill"], at["bootstrap"] - at["prefill"]) == pytest.approx((0.5, 0.1))
    assert at["decode"] == 1.5
    assert shift_of(found) == {"prefill-1": -ahead_ms - 1}
    prefill = next(one for one in found if one.name == "prefill")
    assert prefill.end_ns - prefill.start_ns == 25.5 * MS
    assert prefill.events[0].at_ns == prefill.start_ns
    assert [one.start_ns for one in found] == sorted(one.start_ns for one in found)


@pytest.mark.parametrize("ahead_ms", [300, -300])
def test_a_process_in_the_middle_takes_those_that_it_calls_along(ahead_ms: float) -> None:
    """Prefill's clock is right, but seems wrong beside decode's."""
    at = starts(corrected(skewed(decode=ahead_ms)))
    assert (at["decode"], at["prefill"], at["open"]) == (1.0, 2.5, 3.6)


def test_all_hosts_may_have_clocks_of_their_own() -> None:
    found = corrected(skewed(decode=700, prefill=-90_000, bootstrap=40))
    at = starts(found)
    assert (at["chat"], at["decode"], at["prefill"]) == (0, 1, 1)
    assert set(shift_of(found)) == {"decode-1", "prefill-1"}, "bootstrap's 40 ms contradict nothing"


def test_the_root_keeps_its_time_when_its_own_clock_is_wrong() -> None:
    at = starts(corrected(skewed(frontend=2000)))
    assert (at["chat"], at["decode"], at["prefill"]) == (2000, 2001, 2001)


def test_what_a_late_call_of_a_failed_caller_did_is_no_skew() -> None:
    late = [TRACE[0], replace(TRACE[1], status="ERROR"), span("decode", "dispatch", "decode-1", 50, 60)]
    assert corrected(late) == late
    assert shift_of(corrected([*late[:1], TRACE[1], late[2]])) == {"decode-1": -49.0}


def test_spans_without_their_caller_and_rings_of_spans_are_left_alone() -> None:
    alone = [replace(TRACE[2], start_ns=0), span("decode", "nowhere", "decode-2", -9000, 1)]
    assert corrected(alone) == alone
    ring = [span("a", "b", "decode-1", 0, 1), span("b", "a", "prefill-1", 500, 501)]
    assert {one.name for one in corrected(ring)} == {"a", "b"}


def test_every_view_shows_the_shift() -> None:
    spans = corrected(skewed(prefill=5000))
    console = Console(width=160, record=True, file=None, color_system=None)
    with console.capture() as shown:
        console.print(trace_table(spans, 160))
    text = shown.get()
    assert "chat: 7 spans, 110.0 ms" in text
    assert "clocks differ: prefill-1 is shown 5001.0 ms earlier" in text
    row = next(line for line in text.splitlines() if "compute" in line)
    assert row.split()[1:3] == ["2.0", "24.0"]
    events = trace_events(spans)["traceEvents"]
    [prefill] = [one for one in events if one["ph"] == "X" and one["name"] == "prefill"]
    assert (prefill["ts"], prefill["args"][SHIFT]) == (1500, -5001.0)
    assert json.dumps(events)
