import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.messaging.micro_services import CallStats, EndpointStats, MicroService
from components.telemetry.stored_spans import Span
from components.telemetry.trace_summary import summary_of
from components.wire.heartbeat import Heartbeat
from components.wire.inspection import ProfilePart
from services.inspect.profile import join_segments, outcome
from services.inspect.trace_view import BAR_WIDTH, trace_list, trace_table
from services.inspect.workers import address_table, load_table, summary
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import endpoint

MS = 1_000_000
D1, F1 = ("decode", "d1"), ("frontend", "f1")  # role and instance id


def rendered(renderable: Any, width: int = 220) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
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


def test_a_trace_fits_into_80_columns_and_shows_all_attributes_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """route.compared, JSON of some hundred characters, was wrapped into lines of ten."""
    monkeypatch.setattr(time, "time", lambda: 10.0)
    spans = [
        span("chat smollm2-135m", None, 0, 253),
        *(span(f"frontend.{name}", "chat smollm2-135m", 1, 100) for name in ("tokenize", "dispatch")),
        span("decode.request", "frontend.dispatch", 3, 250),
        span("decode.choose_prefill", "decode.request", 3, 4, **{"route.why": "cached", "route.compared": "x" * 300}),
    ]
    lines = rendered(trace_table(spans, 80), 80)
    assert len(lines) == len(spans) + 4, "a line each, and title, heading and a word on --wide"
    assert "…" not in "".join(lines)
    assert any("route.why=cached" in line for line in rendered(trace_table(spans, 120), 120))
    assert "xxxx" not in "".join(rendered(trace_table(spans, 220)))
    assert "route.compared=xxxx" in "".join(rendered(trace_table(spans, 220, wide=True), 400))


@pytest.mark.parametrize("width", [80, 109, 110, 120, 160, 220])
@pytest.mark.parametrize(
    "model", ["smollm2-135m", "an-organisation/a-model-with-a-name-that-is-far-too-long-for-any-terminal"]
)
def test_long_attributes_take_nothing_from_the_times(width: int, model: str) -> None:
    """From 110 columns on a long route.why took the width of all other columns: start and ms were empty."""
    spans = [
        span(f"chat {model}", None, 0, 123_456.7),
        span("decode.request", f"chat {model}", 3, 123_450),
        span("decode.choose_prefill", "decode.request", 3, 123_450, **{"route.why": "one long reason " * 20}),
    ]
    lines = rendered(trace_table(spans, width), width)
    assert max(map(len, lines)) <= width
    chosen = next(line for line in lines if line.startswith("    decode.choose_prefill "))
    assert chosen.split()[1:3] == ["3.0", "123447.0"]
    assert "decode-1" in chosen
    assert len({line.index("█") for line in lines if "█" in line}) == 1
    assert [line.count("█") for line in lines if "chat " in line][-1] == (BAR_WIDTH if width >= 110 else 10)


def test_an_old_trace_shows_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 10_000.0)
    fresh, old = (span("root", None, (10_000 - age_s) * 1000, 10_000_000) for age_s in (5, 35 * 60))
    assert "ago" not in rendered(trace_table([fresh]))[0]
    assert rendered(trace_table([old]))[0].rstrip().endswith("; 35 min ago")


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (span("r", None, 0, 1), "ok"),
        (span("r", None, 0, 1, slow=True, moved=True), "slow,moved"),
        (span("r", None, 0, 1, cancelled="the client has gone"), "cancelled"),
    ],
)
def test_a_row_of_a_list_has_the_time_and_the_outcome(one: Span, status: str) -> None:
    _, row = rendered(trace_list([summary_of([one])]), 80)
    assert row.split()[-2:] == [status, "r"]
    assert re.match(r"1970-01-0\d \d\d:\d\d  f{12} ", row)


def test_words_of_clients_cannot_control_the_terminal() -> None:
    """A model's name in a request could set the title of an operator's terminal, or its clipboard."""
    nasty = "chat \x1b]52;c;eA==\x07\nx"
    one = replace(span(nasty, None, 0, 1, "ERROR"), error=nasty)
    lines = [*rendered(trace_list([summary_of([one])]), 300), *rendered(trace_table([one], 300), 300)]
    assert "chat \\x1b]52" in lines[1]
    assert not any(char in line for line in lines for char in "\x1b\x07")


def test_a_list_of_traces_fits_into_80_columns() -> None:
    """It had 91: every line was wrapped."""
    cancelled = span("chat smollm2-135m", None, 0, 123_456.7, cancelled="the client has gone")
    failed = replace(span("chat " + "long" * 30, None, 0, 1, "ERROR"), error="why " * 30)
    _, *rows = rendered(trace_list([summary_of([cancelled] * 123), summary_of([failed])]), 80)
    assert [len(row.rstrip()) <= 80 for row in rows] == [True, True]
    assert rows[0].split()[2:6] == ["ffffffffffff", "123456.7", "123", "cancelled"]
    assert rows[1].rstrip().endswith("…")


def test_a_span_whose_parent_was_not_kept_is_at_the_root() -> None:
    rows = [line for line in rendered(trace_table([span("orphan", "lost", 0, 0)])) if "decode-1" in line]
    assert rows[0].startswith("orphan")
    assert "█" in rows[0], "a span without duration is seen too"


def stats(errors: int = 0) -> MicroService:
    endpoints = (EndpointStats("generate", 7, CallStats(errors)), EndpointStats("cancel", 1))
    return MicroService("kvmesh-decode", endpoints=endpoints)


def test_workers_are_shown_with_facts_of_etcd_and_of_nats() -> None:
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
    worker = record(
        "d1",
        kv=endpoint(),
        max_running=256,
        max_step_tokens=8192,
        model="m",
        adapters={"legal": "w1"},
        http="http://10.0.0.1:12345",
    )
    frontend = record("f1", role="frontend", http="http://127.0.0.1:8000", metrics="http://127.0.0.1:34567")
    records, services = [worker, frontend], {D1: stats(errors=2), F1: stats()}
    assert summary(records, "kvmesh") == "namespace kvmesh: 2 instances of legal, m"
    lines = rendered(load_table(records, {D1: beat}, services, wide=False), 80)
    [row] = [line.split() for line in lines if "d1" in line]
    assert row[:3] == ["decode", "d1", "1"]
    assert row[-9:] == ["draining", "3", "2", "1", "6", "%", "of", "16", "2"]
    [wide] = [line for line in rendered(load_table(records, {D1: beat}, services, wide=True)) if "d1" in line]
    for fact in ("e1", "m legal", "10/5/1", "256 x 8192", "generate:7 cancel:1"):
        assert fact in wide
    lines += rendered(address_table(records), 80)
    assert "…" not in "".join(lines), "80 columns hold it all"
    assert [line.split() for line in lines if "http" in line and "://" in line] == [
        ["decode", "d1", "cpu", "http://10.0.0.1:12345"],
        ["frontend", "f1", "http://127.0.0.1:8000", "http://127.0.0.1:34567"],
    ]


def test_processes_with_one_instance_id_are_shown_each_with_its_own_load() -> None:
    """A frontend and a bootstrap had the pages of the worker with their id."""
    frontend, worker = record("host-1", role="frontend"), record("host-1", kv=endpoint())
    beat = Heartbeat(instance_id="host-1", epoch="e1", step=1, busy=False, free_pages=10, total_pages=10)
    services = {("frontend", "host-1"): stats(errors=3), ("decode", "host-1"): stats()}
    lines = rendered(load_table([frontend, worker], {("decode", "host-1"): beat}, services, wide=False), 80)
    rows = {line.split()[0]: line.split() for line in lines if "host-1" in line}
    assert rows["frontend"][-2:] == ["ok", "3"]
    assert rows["decode"][-5:] == ["0", "%", "of", "10", "0"]


def test_addresses_are_whole_on_a_narrow_screen() -> None:
    """Their ends were cut off, and ids were not shown at all."""
    url = "http://a-host-with-a-long-name.example.org"
    worker = record("d1", kv=endpoint(), http=f"{url}:12345")
    frontend = record("f1", role="frontend", http=f"{url}:8000", metrics=f"{url}:34567")
    lines = rendered(address_table([worker, frontend]), 60)
    assert {line.split()[1] for line in lines if line.startswith(("decode", "frontend"))} == {"d1", "f1"}
    last = lines[0].index("metrics")
    assert f"{url}:12345{url}:34567" in "".join(line[last:].strip() for line in lines)


def test_a_worker_without_answer_and_one_without_heartbeat_are_marked() -> None:
    frontend_record = record("f1", role="frontend")
    lines = rendered(load_table([record("d1", kv=endpoint()), frontend_record], {}, {F1: stats()}, wide=False), 80)
    [decode], [frontend] = ([line for line in lines if name in line] for name in ("d1", "f1"))
    assert "no answer" in decode
    assert " ok " in frontend
    [decode] = [
        x for x in rendered(load_table([record("d1", kv=endpoint())], {}, {D1: stats()}, wide=False), 80) if "d1" in x
    ]
    assert "silent" in decode


def test_an_idle_workers_profile_is_not_to_be_opened() -> None:
    """The output was "computed nothing", and then "Open it in Perfetto."."""
    made = [
        outcome(Path("p.json"), "decode d", ProfilePart(data=b"", size_bytes=2_000_000, seconds=5.0, steps=steps))
        for steps in (0, 7)
    ]
    assert (
        made[0]
        == "[yellow]decode d was idle: it computed nothing in 5.0 s, so p.json has no steps. Send it requests while you record."
    )
    assert made[1] == "p.json: 5.0 s of decode d, 7 steps, 2.0 MB. Open it in Perfetto."


def test_segments_of_a_profile_become_one_trace() -> None:
    name = {"ph": "M", "name": "process_name", "pid": 7, "tid": 0}
    segments = [
        {"role": "decode", "baseTimeNanoseconds": 5, "traceEvents": [name, {"ph": "X", "ts": 1}]},
        {"role": "decode", "baseTimeNanoseconds": 5, "traceEvents": [name, {"ph": "X", "ts": 2}], "traceName": "x"},
    ]
    whole = join_segments("".join(f"\n{json.dumps(segment, indent=1)}\n" for segment in segments))
    assert whole.keys() == {"role", "baseTimeNanoseconds", "traceEvents"}
    assert whole["traceEvents"] == [name, {"ph": "X", "ts": 1}, {"ph": "X", "ts": 2}]
