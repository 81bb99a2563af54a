import io
import json
from typing import Any

from rich.console import Console

from components.telemetry.trace_store import Span
from components.wire.heartbeat import Heartbeat
from services.inspect.profile import join_segments
from services.inspect.trace_view import BAR_WIDTH, trace_table
from services.inspect.workers import _table
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import endpoint

MS = 1_000_000


def rendered(renderable: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=220, color_system=None).print(renderable)
    return out.getvalue().splitlines()


def span(name: str, parent: str | None, start_ms: float, end_ms: float, status: str = "UNSET", **facts: Any) -> Span:
    return Span(
        "f" * 32,
        name,
        parent,
        "decode-1",
        name,
        int(start_ms * MS),
        int(end_ms * MS),
        status,
        {f"kvmesh.{k}": v for k, v in facts.items()},
    )


def test_a_trace_is_a_tree_in_time_with_offsets_and_durations() -> None:
    lines = rendered(
        trace_table(
            [
                span("root", None, 100, 140, request_id="abc"),
                span("second", "root", 120, 130, pages=3),
                span("first", "root", 105, 110),
                span("inside", "first", 106, 107.25),
            ]
        )
    )
    assert lines[0].startswith("root: 4 spans, 40.0 ms")
    assert "request abc" in lines[1]
    rows = [line for line in lines if "decode-1" in line]
    assert [row.split()[:3] for row in rows] == [
        ["root", "0.0", "40.0"],
        ["first", "5.0", "5.0"],
        ["inside", "6.0", "1.2"],
        ["second", "20.0", "10.0"],
    ]
    assert [len(row) - len(row.lstrip()) for row in rows] == [0, 2, 4, 2]
    assert rows[0].count("█") == BAR_WIDTH
    assert "pages=3" in rows[3]
    assert "request_id" not in rows[0]


def test_a_span_whose_parent_was_not_kept_stands_at_the_root() -> None:
    rows = [line for line in rendered(trace_table([span("orphan", "lost", 0, 0)])) if "decode-1" in line]
    assert rows[0].startswith("orphan")
    assert "█" in rows[0], "a span without duration is seen too"


def stats(errors: int = 0) -> dict[str, Any]:
    return {
        "name": "kvmesh-decode",
        "endpoints": [
            {"name": "generate", "num_requests": 7, "data": {"errors": errors}},
            {"name": "cancel", "num_requests": 1, "data": None},
        ],
    }


def test_workers_stand_with_what_etcd_knows_beside_what_nats_answers() -> None:
    beat = Heartbeat(
        instance_id="d1",
        epoch="e1",
        step=1,
        busy=True,
        draining=True,
        num_running=3,
        num_waiting=2,
        num_held=1,
        free_pages=10,
        cached_pages=5,
        held_pages=1,
        total_pages=16,
    )
    worker = record("d1", kv=endpoint(), model="m", adapters={"legal": "w1"})
    lines = rendered(_table([worker], {"d1": beat}, {"d1": stats(errors=2)}))
    [row] = [line for line in lines if "d1" in line]
    for fact in ("decode", "e1", "h:1", "m legal", "generate:7", "2", "3/2/1 draining", "10/5/1 of 16"):
        assert fact in row


def test_a_worker_that_does_not_answer_and_one_that_does_not_beat_are_seen() -> None:
    frontend_record = record("f1", role="frontend", http="http://h:8000", metrics="http://h:9")
    lines = rendered(_table([record("d1", kv=endpoint()), frontend_record], {}, {"f1": stats()}))
    [decode], [frontend] = ([line for line in lines if name in line] for name in ("d1", "f1"))
    assert "no answer" in decode
    assert "silent" in decode
    assert "silent" not in frontend
    assert "http://h:8000 http://h:9" in frontend


def test_segments_of_a_profile_become_one_trace() -> None:
    name = {"ph": "M", "name": "process_name", "pid": 7, "tid": 0}
    segments = [
        {"role": "decode", "baseTimeNanoseconds": 5, "traceEvents": [name, {"ph": "X", "ts": 1}]},
        {"role": "decode", "baseTimeNanoseconds": 5, "traceEvents": [name, {"ph": "X", "ts": 2}], "traceName": "x"},
    ]
    whole = join_segments("".join(f"\n{json.dumps(segment, indent=1)}\n" for segment in segments))
    assert whole.keys() == {"role", "baseTimeNanoseconds", "traceEvents"}
    assert whole["traceEvents"] == [name, {"ph": "X", "ts": 1}, {"ph": "X", "ts": 2}]
