"""`inspect top` and `inspect rooms`, from statuses."""

import io
from typing import Any

from rich.console import Console

from components.wire.status import LinkStatus, RoomStatus
from services.inspect.rooms import joined, room_table
from services.inspect.top import drawn, frame_of, links_of, size
from tests.services.inspect.meshes import seen, with_ranks


def rendered(renderable: Any, width: int = 160) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_row_shows_load_kv_usage_and_the_age_of_the_latest_heartbeat() -> None:
    mesh = [
        seen("frontend", running=3, heartbeat_ages_s={"d1": 0.4}),
        seen(
            "decode",
            running=2,
            waiting=1,
            oldest_queued_s={"waiting": 1.25, "running": 60.0},
            tokens_per_s=87.0,
            num_rooms=4,
        ),
        seen("prefill", tokens_per_s=900.0, heartbeat_ages_s={"d1": 0.2}),
    ]
    frame = frame_of(mesh, "ns", 0.0)
    decode = frame.rows[1]
    assert (decode.state, decode.running, decode.waiting, decode.oldest_queued_s) == ("ok", 2, 1, 1.25)
    assert (decode.kv_used, decode.kv_cached) == (0.2, 0.3)
    assert decode.heartbeat_age_s == 0.2, "of whoever heard it last"
    lines = rendered(drawn(frame, 160))
    assert "3 instances  87 tokens/s generated  900 tokens/s of prompts  2 running  1 queued" in lines[0]
    [row] = [line for line in lines if line.startswith("decode")]
    cells = ("20", "%", "30", "%", "87", "0.2", "s", "0", "ms")
    assert row.split() == [*("decode", "d1", "ok", "90", "s", "2", "1", "1.2", "s", "4"), *cells]


def test_states_tell_silent_unanswering_draining_and_drained_apart() -> None:
    mesh = [
        seen("frontend", heartbeat_ages_s={"d1": 0.1, "d2": 7.5, "d3": 0.1, "d4": 0.1}),
        seen("decode", 1, answers=False),
        seen("decode", 2),
        seen("decode", 3, draining=True, running=1),
        seen("decode", 4, draining=True),
        seen("prefill", 1, draining=True, queues={"inflight": 1}),
    ]
    states = [row.state for row in frame_of(mesh, "ns", 0.0).rows]
    assert states == ["ok", "no answer", "silent", "draining", "drained", "draining"]
    assert "2 in trouble" in rendered(drawn(frame_of(mesh, "ns", 0.0), 160))[0]


def test_a_link_has_one_line_though_both_ends_report_it_and_none_after_one_has_gone() -> None:
    mesh = [
        seen("decode", links=[LinkStatus(peer="p1", transfers=5, failures=1, bytes=100, bytes_per_s=7.0)]),
        seen("prefill", links=[LinkStatus(peer="d1", transfers=2), LinkStatus(peer="d9", transfers=9)]),
    ]
    [link] = links_of(mesh)
    assert (link.prefill, link.decode, link.transfers, link.failures, link.bytes) == ("p1", "d1", 5, 1, 100)
    assert any("p1 → d1" in line for line in rendered(drawn(frame_of(mesh, "ns", 0.0), 160)))


def test_200_instances_fit_on_a_screen_and_those_in_trouble_are_on_it() -> None:
    links = [LinkStatus(peer=f"d{n}") for n in range(100)]
    mesh = [seen("decode", n, answers=n != 150) for n in range(200)] + [seen("prefill", links=links)]
    lines = rendered(drawn(frame_of(mesh, "ns", 0.0), 160, height=40))
    assert len(lines) <= 40
    assert any("d150" in line and "no answer" in line for line in lines)
    assert any("more instances" in line for line in lines)
    assert any("more links" in line for line in lines)


def test_80_columns_show_the_state_the_load_and_the_heartbeat_of_each_instance_whole() -> None:
    mesh = [
        seen("frontend", heartbeat_ages_s={"d1": 12.3}),
        seen("bootstrap"),
        seen("decode", running=200, waiting=100, tokens_per_s=12345.0, oldest_queued_s={"waiting": 12.5}),
        seen("prefill", answers=False, num_rooms=4),
    ]
    lines = rendered(drawn(frame_of(mesh, "ns", 0.0), 80), 80)
    assert not any("…" in line for line in lines)
    [row] = [line for line in lines if line.startswith("decode")]
    assert row.split() == ["decode", "d1", "silent", "200", "100", "12.5", "s", "20", "%", "12345", "12.3", "s"]


def test_a_frame_for_programs_has_rows_links_and_totals() -> None:
    shown = frame_of([seen("decode", tokens_per_s=5.0)], "ns", 12.0).json()
    assert (shown["namespace"], shown["unix_s"], shown["decoded_tokens_per_s"]) == ("ns", 12.0, 5.0)
    assert shown["rows"][0]["instance"] == "d1"


def test_sizes_are_short() -> None:
    assert [size(n) for n in (12, 3400, 5.6e6, 7.8e9)] == ["12 B", "3.4 kB", "5.6 MB", "7.8 GB"]


def room(name: str, request_id: str, state: str, age_s: float, peer: str) -> RoomStatus:
    return RoomStatus(room=name, request_id=request_id, state=state, age_s=age_s, peer=peer)


def test_a_room_joins_what_its_three_sides_report_the_oldest_first() -> None:
    mesh = [
        seen("bootstrap", rooms=[room("r1", "q", "open", 0.5, "p1")]),
        seen("decode", rooms=[room("r1", "q", "transfer", 0.6, "p1"), room("r2", "z", "pinned", 30.0, "p1")]),
        seen("prefill", rooms=[room("r1", "q", "computing", 0.4, "d1")]),
    ]
    old, young = joined(mesh)
    assert (old.room, old.age_s, old.prefill) == ("r2", 30.0, None)
    assert (young.room, young.request_id, young.age_s) == ("r1", "q", 0.6)
    assert young.decode is not None
    assert young.bootstrap is not None
    assert young.prefill is not None
    assert (young.decode.state, young.bootstrap.state, young.prefill.state) == ("transfer", "open", "computing")
    assert rendered(room_table([old, young]))[1].split() == ["r2", "30", "s", "z", "d1", "pinned", "30.0", "s"]


def test_numbers_of_devices_are_shown_if_an_instance_has_several() -> None:
    mesh = [seen("frontend"), seen("decode"), with_ranks(seen("prefill"), "cuda:2", "cuda:3")]
    frame = frame_of(mesh, "ns", 0.0)
    assert [row.devices for row in frame.rows] == [0, 1, 2]
    [head, *rows] = rendered(drawn(frame, 160))[1:]
    assert head.split()[:4] == ["role", "instance", "devices", "state"]
    assert [row.split()[2] for row in rows] == ["ok", "1", "2"]
    assert "devices" not in rendered(drawn(frame_of(mesh[:2], "ns", 0.0), 160))[1]
