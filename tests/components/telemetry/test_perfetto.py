from typing import Any

from components.telemetry.perfetto import trace_events
from components.telemetry.stored_spans import Event, Span

US = 1000


def span(name: str, parent: str | None, start_us: int, end_us: int, service: str = "decode-1", **more: Any) -> Span:
    ids = {"root": "1" * 16, "call": "2" * 16, "one": "3" * 16, "two": "4" * 16, "inside": "5" * 16}
    return Span(
        "f" * 32, ids[name], ids.get(parent or ""), service, name, start_us * US, end_us * US, "UNSET", {"a": 1}, **more
    )


SPANS = [
    span("root", None, 100, 200, "frontend-1"),
    span("call", "root", 110, 190, events=(Event("recompute", 150 * US, {"cause": "c"}),)),
    span("one", "call", 120, 160),
    span("inside", "one", 125, 130),
    span("two", "call", 140, 170),
]


def complete() -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in trace_events(SPANS)["traceEvents"] if event["ph"] == "X"}


def test_each_span_has_its_time_since_the_beginning_in_microseconds() -> None:
    found = complete()
    assert [(event["ts"], event["dur"]) for event in found.values()] == [
        (0, 100),
        (10, 80),
        (20, 40),
        (25, 5),
        (40, 30),
    ]
    assert found["one"]["args"]["a"] == 1


def test_processes_are_named_and_calls_between_them_are_arrows() -> None:
    events = trace_events(SPANS)["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["frontend-1", "decode-1"]
    begin, end = (event for event in events if event["ph"] in {"s", "f"})
    assert begin["id"] == end["id"]
    assert (begin["pid"], begin["ts"], end["pid"], end["ts"]) == (1, 10, 2, 10)
    [instant] = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["pid"]) == ("recompute", 50, 2)


def test_spans_of_one_thread_lie_within_or_after_each_other() -> None:
    """Perfetto drops or cuts a slice that crosses the one before it."""
    found = complete()
    lanes = {name: (event["pid"], event["tid"]) for name, event in found.items()}
    assert lanes["call"] == lanes["one"] == lanes["inside"]
    assert lanes["two"] != lanes["one"]
