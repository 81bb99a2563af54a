import multiprocessing
import sqlite3
from collections.abc import Callable
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from components.telemetry import otlp_encoder
from components.telemetry.packed_spans import PackedSpan
from components.telemetry.spans import Spans
from components.telemetry.stored_spans import Event
from components.telemetry.trace_file import DAMAGED_NAME, FILE_NAME
from components.telemetry.trace_pieces import Piece, Root
from components.telemetry.trace_reader import LocalTraceReader, TracesUnavailable
from components.telemetry.trace_store import TRIM_EVERY, Limits, TraceStore, TraceWriter
from tests.components.telemetry.written import writing_tracer
from tests.waiting import PATIENCE_S

FILES = 20  # each as at the first start of a mesh


def keep(tracer: Spans, name: str, start_ns: int, request_id: str | None = None) -> str:
    """Keep a trace of one span; returns its id."""
    attributes = {} if request_id is None else {"kvmesh.request_id": request_id}
    span = tracer.start_span(name, start_time=start_ns, attributes=attributes)
    span.end(start_ns + 5)
    return f"{span.get_span_context().trace_id:032x}"


def test_a_trace_is_read_as_it_was_made(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path / "new" / "home", "decode-1")
    root = tracer.start_span("root", start_time=10)
    root.set_status(Status(StatusCode.ERROR, "why"))
    root.add_event("moved", {"from": "d1"}, 11)
    child = tracer.start_span("child", trace.set_span_in_context(root), start_time=12, attributes={"kvmesh.pages": 3})
    child.end(14)
    root.end(20)
    writer.close()
    store = TraceStore(tmp_path / "new" / "home")
    [trace_id] = store.last_trace_ids()
    one, two = store.trace(trace_id)
    assert (one.name, one.service, one.status, one.parent_id, one.start_ns, one.end_ns) == (
        "root",
        "decode-1",
        "ERROR",
        None,
        10,
        20,
    )
    assert (one.error, one.events) == ("why", (Event("moved", 11, {"from": "d1"}),))
    assert (two.name, two.parent_id, two.attributes) == ("child", one.span_id, {"kvmesh.pages": 3})


def test_a_trace_is_found_by_the_beginning_of_its_id_or_its_request_id(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path)
    first = keep(tracer, "a", 1, "feed1234")
    second = keep(tracer, "b", 2)
    writer.close()
    store = TraceStore(tmp_path)
    assert store.last_trace_ids() == [second, first]
    assert store.last_trace_ids(1) == [second]
    assert [s.name for s in store.trace(first[:12])] == ["a"]
    assert [s.name for s in store.trace("feed1")] == ["a"]
    assert store.trace("nothing begins so") == []


def test_a_clients_own_request_id_given_whole_names_the_last_of_its_requests(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path)
    for number, name in enumerate(["a", "b"]):
        attributes = {"kvmesh.request_id": f"ours{number}", "kvmesh.client_request_id": "mine-7"}
        tracer.start_span(name, start_time=number + 1, attributes=attributes).end(9)
    writer.close()
    store = TraceStore(tmp_path)
    assert [s.name for s in store.trace("mine-7")] == ["b"]
    assert store.trace("mine") == []


def _write(home: Path, number: int, barrier: Barrier) -> None:
    for file in range(FILES):
        tracer, writer = writing_tracer(home / str(file), f"process-{number}")
        barrier.wait()
        for turn in range(10):
            keep(tracer, f"{number}-{turn}", turn)
        writer.close()


def test_several_processes_make_and_write_one_file_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """A process that lost the race to set WAL on a new file got "locked", and dropped a span."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the locks of other tests' threads
    barrier = context.Barrier(3)
    processes = [context.Process(target=_write, args=(tmp_path, n, barrier)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    for file in range(FILES):
        connection = sqlite3.connect(tmp_path / str(file) / FILE_NAME)
        rows = connection.execute("select service, sum(num_spans) from batches group by service").fetchall()
        connection.close()
        assert rows == [(f"process-{n}", 10) for n in range(3)]


def test_only_the_newest_traces_are_kept(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, Limits(traces=20))
    for start in range(50):
        writer.write("test", [Piece(f"{start:032x}", start, 1, b"")])
    for _ in range(TRIM_EVERY - 50 % TRIM_EVERY):
        writer.write("test", [])
    writer.close()
    assert TraceStore(tmp_path).last_trace_ids(100) == [f"{start:032x}" for start in range(49, 29, -1)]


def test_a_failed_or_slow_trace_outlives_many_others(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path, limits=Limits(traces=5))
    failed = tracer.start_span("failed", start_time=1, attributes={"kvmesh.request_id": "f"})
    failed.set_status(Status(StatusCode.ERROR, "why"))
    failed.end(2)
    tracer.start_span("slow", start_time=2, attributes={"kvmesh.request_id": "s", "kvmesh.slow": True}).end(3)
    tracer.start_span("moved", start_time=3, attributes={"kvmesh.request_id": "m", "kvmesh.moved": True}).end(4)
    for number in range(TRIM_EVERY):
        keep(tracer, f"n{number}", number + 10, f"r{number}")
    for _ in range(TRIM_EVERY - 3):
        writer.write("test", [])
    writer.close()
    store = TraceStore(tmp_path)
    newest = [f"n{TRIM_EVERY - 1 - number}" for number in range(5)]
    assert [store.trace(id_)[0].name for id_ in store.last_trace_ids(100)] == [*newest, "moved", "slow", "failed"]
    assert [store.trace(id_)[0].name for id_ in store.trace_ids("slow")] == ["slow"]
    assert [store.trace(id_)[0].name for id_ in store.trace_ids("failed")] == ["failed"]


def piece(number: int, *, slow: bool = False) -> Piece:
    root = Root(number, False, f"r{number}", None, slow, False)
    spans = msgspec.msgpack.encode([PackedSpan(number, 0, f"n{number}", number, number + 1, 0, "", {}, [])])
    return Piece(f"{number:032x}", number, 1, spans, [root])


def test_of_an_old_batch_slow_traces_alone_are_kept_and_of_these_the_newest(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, Limits(traces=3))
    numbers = range(1, TRIM_EVERY + 1)
    for number in numbers:
        of_batch = (10 * number, 10 * number + 1, 10 * number + 2)
        writer.write("test", [piece(n, slow=n % 10 == 1 and number <= 5) for n in of_batch])
    writer.close()
    store = TraceStore(tmp_path)
    newest = 10 * TRIM_EVERY
    kept = [newest + 2, newest + 1, newest, 51, 41, 31]
    assert store.last_trace_ids(100) == [f"{number:032x}" for number in kept]
    assert [[span.name for span in spans] for spans in store.traces(store.last_trace_ids(100)).values()] == [
        [f"n{number}"] for number in kept
    ]
    assert store.trace_ids("slow") == [f"{number:032x}" for number in (51, 41, 31)]
    assert [[span.name for span in store.trace(request_id)] for request_id in ("r51", "r52")] == [["n51"], []]


def test_the_last_traces_are_found_though_each_is_in_a_batch_of_each_process(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    for number in range(1, 6):
        for process in ("prefill", "decode", "frontend"):
            writer.write(process, [piece(number)])
    writer.close()
    assert TraceStore(tmp_path).last_trace_ids(4) == [f"{number:032x}" for number in (5, 4, 3, 2)]


def test_any_number_of_requests_in_one_trace_stay_within_the_bound(tmp_path: Path) -> None:
    """With one trace id for all requests of a client, the file grew without bound: only traces were counted."""
    tracer, writer = writing_tracer(tmp_path, limits=Limits(spans=100))
    root = tracer.start_span("root", start_time=1)
    root.end()  # so that the others are separate pieces
    for number in range(300):
        tracer.start_span(f"n{number}", trace.set_span_in_context(root), start_time=number + 1).end(number + 2)
    for _ in range(TRIM_EVERY):
        writer.write("test", [])
    writer.close()
    store = TraceStore(tmp_path)
    kept = store.trace(store.last_trace_ids(1)[0])
    assert 100 <= len(kept) < 110  # a tenth may be added before the next count
    assert {f"n{number}" for number in range(201, 300)} <= {span.name for span in kept}


def test_large_spans_stay_within_the_bound_of_bytes(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path, limits=Limits(bytes=1 << 20))
    for number in range(4 * TRIM_EVERY):
        span = tracer.start_span(f"n{number}", start_time=number + 1, attributes={"stop": "x" * 100_000})
        span.set_attribute("many", ["y" * 1000] * 100)
        span.end(number + 2)
    writer.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8 << 20  # WAL included
    store = TraceStore(tmp_path)
    newest = store.trace(store.last_trace_ids(1)[0])[0]
    assert newest.name == f"n{4 * TRIM_EVERY - 1}"
    assert max(len(str(value)) for value in newest.attributes.values()) == otlp_encoder.ATTRIBUTE_CHARS


def test_only_the_user_who_runs_the_mesh_can_read_the_traces(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch(mode=0o644)
    tracer, writer = writing_tracer(tmp_path)
    keep(tracer, "a", 1)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    writer.close()


def test_where_nothing_was_kept_there_is_nothing_to_read_and_no_file_is_made(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    assert store.last_trace_ids() == []
    assert store.trace("a") == []
    assert not list(tmp_path.iterdir())


PAGE = 4096
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first pages": lambda data: data[:PAGE] + bytes(5 * PAGE) + data[6 * PAGE :],
    "later pages": lambda data: data[: 20 * PAGE] + bytes(5 * PAGE) + data[25 * PAGE :],
    "header": lambda data: bytes(PAGE) + data[PAGE:],
    "cut": lambda data: data[: len(data) // 3],
    "junk": lambda data: b"this is no database, " * 100,
}


def damage(home: Path, kind: str) -> None:
    """Damage the file, like a power failure. Its 60 traces are not touched by the next writes."""
    writer = TraceWriter(home)
    for number in range(60):
        assert writer.write("test", [piece(number), Piece(f"{number:032x}", 1, 1, b"x" * 2 * PAGE)])
    writer.close()
    (home / FILE_NAME).write_bytes(DAMAGES[kind]((home / FILE_NAME).read_bytes()))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_moved_aside_and_a_new_one_begins(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All later writes failed, also after a restart."""
    damage(tmp_path, kind)
    damaged = (tmp_path / FILE_NAME).read_bytes()
    writers = [TraceWriter(tmp_path), TraceWriter(tmp_path)]
    for number in range(100, 104):
        assert writers[number % 2].write("test", [piece(number)])
    assert TraceStore(tmp_path).last_trace_ids() == [f"{number:032x}" for number in (103, 102, 101, 100)]
    [warning] = caplog.records
    assert warning.__dict__["moved_to"] == str(tmp_path / DAMAGED_NAME)
    assert (tmp_path / DAMAGED_NAME).read_bytes() == damaged
    for writer in writers:
        writer.close()
    damage(tmp_path, "header")
    assert writers[0].write("test", [piece(1)])
    writers[0].close()
    assert {file.name for file in tmp_path.iterdir()} == {FILE_NAME, DAMAGED_NAME}


def test_a_file_that_is_damaged_while_processes_write_it_is_moved_aside_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = [TraceWriter(tmp_path) for _ in range(3)]
    for number in range(60):
        assert writers[number % 3].write("test", [piece(number)])
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("pragma wal_checkpoint(truncate)")
    with (tmp_path / FILE_NAME).open("r+b") as stream:
        stream.write(bytes(6 * PAGE))
    for number in range(100, 112):
        assert writers[number % 3].write("test", [piece(number)])
    assert TraceStore(tmp_path).last_trace_ids() == [f"{number:032x}" for number in range(111, 99, -1)]
    assert len(caplog.records) == 1
    for writer in writers:
        writer.close()
    assert len(TraceStore(tmp_path).last_trace_ids()) == 12


def test_of_a_damaged_file_readers_name_the_cure(tmp_path: Path) -> None:
    damage(tmp_path, "header")
    with pytest.raises(TracesUnavailable, match=f"is damaged: file is not a database. .* moves it to {DAMAGED_NAME}"):
        LocalTraceReader(tmp_path).listed()
    writer = TraceWriter(tmp_path)
    assert writer.write("test", [piece(1)])
    writer.close()
    assert [one.trace_id for one in LocalTraceReader(tmp_path).listed()] == [f"{1:032x}"]


def test_a_damaged_file_that_cannot_be_moved_costs_the_spans_and_not_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(tmp_path, "junk")
    (tmp_path / DAMAGED_NAME).mkdir()
    writer = TraceWriter(tmp_path)
    assert not writer.write("test", [])
    assert caplog.messages == ["the damaged trace file cannot be moved aside", "spans not kept"]
    (tmp_path / FILE_NAME).unlink()
    assert writer.write("test", [])
    writer.close()


@pytest.mark.parametrize(
    "statement",
    ["delete from batch_spans where batch = 2", "update batches set trace_ids = cast(x'ff' as text) where batch = 2"],
)
def test_rows_that_a_power_failure_tore_do_not_stop_later_writes(statement: str, tmp_path: Path) -> None:
    """The trim of old batches raised an error that is not SQLite's, at each write."""
    writer = TraceWriter(tmp_path, Limits(traces=3))
    for number in range(1, 6):
        assert writer.write("test", [piece(number, slow=number == 2)])
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file, file:
        file.execute(statement)
    if statement.startswith("update"):
        with pytest.raises(TracesUnavailable, match="is damaged"):
            LocalTraceReader(tmp_path).listed()
    for number in range(6, 2 * TRIM_EVERY):
        assert writer.write("test", [piece(number)])
    writer.close()
    newest = [2 * TRIM_EVERY - 1 - number for number in range(3)]
    assert TraceStore(tmp_path).last_trace_ids(3) == [f"{number:032x}" for number in newest]


def test_a_folder_that_cannot_be_made_costs_the_spans_and_not_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """Each service ended with a traceback."""
    home = Path("/dev/null/x")
    writer = TraceWriter(home)
    assert not writer.write("test", [piece(1)])
    [warning] = [record for record in caplog.records if record.message == "spans not kept"]
    assert (warning.__dict__["file"], warning.__dict__["count"]) == (str(home / FILE_NAME), 1)
    writer.close()


def test_a_batch_that_cannot_be_read_costs_its_own_spans_alone(tmp_path: Path) -> None:
    """The trim of old batches failed at a damaged one, and with it all later writes."""
    writer = TraceWriter(tmp_path, Limits(traces=3))
    for number in range(1, 6):
        assert writer.write("test", [piece(number, slow=number in (2, 3))])
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file, file:
        file.execute("update batch_spans set packed = x'93ff' where batch = 2")
    reader = LocalTraceReader(tmp_path)
    assert [one.trace_id[-1] for one in reader.listed()] == ["5", "4", "3", "1"]
    assert reader.spans(f"{2:032x}") == []
    for number in range(6, 2 * TRIM_EVERY):
        assert writer.write("test", [piece(number)])
    writer.close()
    newest = [2 * TRIM_EVERY - 1 - number for number in range(3)]
    assert TraceStore(tmp_path).last_trace_ids(3) == [f"{number:032x}" for number in newest]
    assert [one.trace_id[-1] for one in reader.listed("slow")] == ["3"]


@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_spans_after_the_file_was_deleted_are_in_a_new_one(what: str, tmp_path: Path) -> None:
    """A running process wrote to the deleted file until its end."""
    home = tmp_path / "home"
    first, second = TraceWriter(home), TraceWriter(home)
    for writer in (first, second):
        assert writer.write("test", [piece(1)])
    for path in home.iterdir():
        path.unlink()
    if what == "its folder":
        home.rmdir()
    for number in range(2, 6):
        assert (first if number % 2 else second).write("test", [piece(number)])
    assert TraceStore(home).last_trace_ids() == [f"{number:032x}" for number in (5, 4, 3, 2)]
    first.close()
    assert second.write("test", [piece(6)])
    second.close()
    assert len(TraceStore(home).last_trace_ids()) == 5


def test_a_broken_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"this is no database, " * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        TraceStore(tmp_path).last_trace_ids()


def test_the_file_of_an_earlier_release_is_empty_and_gives_way(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as earlier:
        earlier.execute("create table spans (trace_id text)")
    earlier.close()
    assert TraceStore(tmp_path).last_trace_ids() == []
    tracer, writer = writing_tracer(tmp_path)
    keep(tracer, "a", 1)
    writer.close()
    assert len(TraceStore(tmp_path).last_trace_ids()) == 1


def test_requests_of_a_tenant_are_found_however_many_newer_ones_others_have(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path)

    def request(number: int, tenant: str = "", **facts: bool) -> str:
        attributes = {"kvmesh.request_id": f"r{number}", **({"kvmesh.tenant": tenant} if tenant else {}), **facts}
        span = tracer.start_span(f"span {number}", attributes=attributes, start_time=number)
        if number == 2:
            span.set_status(StatusCode.ERROR, "no")
        span.end(number + 1)
        return f"{span.get_span_context().trace_id:032x}"

    first, second = request(1, "acme", **{"kvmesh.slow": True}), request(2, "acme")
    for number in range(3, 30):
        request(number, "other" if number % 2 else "")
    writer.close()
    reader = LocalTraceReader(tmp_path)
    assert [one.trace_id for one in reader.listed("recent", 5, "acme")] == [second, first]
    assert [one.tenant for one in reader.listed("recent", 5, "acme")] == ["acme", "acme"]
    assert [one.trace_id for one in reader.listed("slow", 5, "acme")] == [first]
    assert [one.trace_id for one in reader.listed("failed", 5, "acme")] == [second]
    assert len(reader.listed("recent", 100, "other")) == 14
    assert reader.listed("recent", 5, "nobody") == []


def test_what_is_trimmed_is_forgotten_of_its_tenant_too(tmp_path: Path) -> None:
    tracer, writer = writing_tracer(tmp_path, limits=Limits(traces=10))
    for number in range(2 * TRIM_EVERY):
        facts = {"kvmesh.request_id": f"r{number}", "kvmesh.tenant": "acme"}
        tracer.start_span("span", attributes=facts, start_time=number).end(number + 1)
    writer.close()
    assert len(LocalTraceReader(tmp_path).listed("recent", 1000, "acme")) == 10
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        assert file.execute("select count(*) from roots").fetchone() == (10,)


def test_a_trace_whose_root_may_have_been_deleted_is_not_rootless(tmp_path: Path) -> None:
    """Its process wrote before the worker, so only its spans were deleted."""
    writer = TraceWriter(tmp_path, Limits(traces=10))
    for number in range(1, TRIM_EVERY + 1):
        writer.write("test", [piece(number) if number % 5 else Piece(f"{number:032x}", number, 1, b"")])
    writer.close()
    assert TraceStore(tmp_path).rootless_ids(100) == [f"{number:032x}" for number in (50,)]
