"""Finished spans in one SQLite file: written by each process of a host, or by the observer for several hosts.

A row of `pieces` holds the spans of one trace that one process exported together, packed or as OTLP's bytes. So a write
costs no decoding, and a trace of a request is about four rows.
"""

import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, Literal, TypeVar

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from components.telemetry.packed_spans import PACKED_FIRST, PackedSpan, unpack_spans
from components.telemetry.trace_pieces import Piece, Root

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S: Final = 5.0  # another process may hold the lock this long
BUSY_RETRY_S: Final = 0.01
TRIM_EVERY: Final = 50  # writes; a trim reads an index
SEEN: Final = 2000  # traces that a writer remembers, so that it need not add them again
FILE_NAME: Final = "traces.sqlite"
TABLES: Final = ("pieces", "traces", "requests", "tenants")
STATUS: Final = ("UNSET", "OK", "ERROR")
LOST: Final = "kvmesh.lost"  # of a span that its caller recorded, as the process died

_SCHEMA: Final = """
drop table if exists spans;
create table if not exists pieces (
    trace_id text not null, service text not null, num_spans integer not null, spans blob not null
);
create index if not exists pieces_by_trace on pieces (trace_id);
create table if not exists traces (
    trace_id text primary key, started_ns integer not null, special integer not null default 0
) without rowid;
create index if not exists traces_by_start on traces (special, started_ns);
create table if not exists requests (
    request_id text primary key, client_request_id text, trace_id text not null, started_ns integer not null,
    failed integer not null, slow integer not null
) without rowid;
create index if not exists requests_by_client on requests (client_request_id) where client_request_id is not null;
create index if not exists requests_by_trace on requests (trace_id);
create table if not exists tenants (request_id text primary key, tenant text not null, trace_id text not null) without rowid;
create index if not exists tenants_by_trace on tenants (trace_id);
create index if not exists tenants_by_tenant on tenants (tenant);
"""
_ADD_TRACE: Final = """
insert into traces values (?, ?, ?) on conflict (trace_id) do update
set started_ns = min(started_ns, excluded.started_ns), special = max(special, excluded.special)
"""
_OF_TENANT: Final = (
    "select distinct trace_id from requests where request_id in (select request_id from tenants where tenant = ?) {}"
    "order by started_ns desc limit ?"
)
_OLDEST: Final = "select trace_id from traces where special = ? order by started_ns desc limit -1 offset ?"
_TRIM_PIECES: Final = """
delete from pieces where rowid <= (select max(piece) from (
    select rowid as piece, sum(num_spans) over (order by rowid desc) as total from pieces) where total > ?)
"""
_COUNT: Final = "select coalesce(sum(num_spans), 0) from pieces"
_USED_BYTES: Final = """
select (page_count - freelist_count) * page_size from pragma_page_count, pragma_freelist_count, pragma_page_size
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The oldest traces are deleted beyond these. Failed, moved and slow ones are counted apart from the others."""

    traces: int = 1000
    spans: int = 50_000  # a client may put many requests into one trace
    bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    at_ns: int  # wall clock
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are wall-clock nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str | None
    service: str
    name: str
    start_ns: int
    end_ns: int
    status: str  # UNSET, OK or ERROR
    attributes: dict[str, Any]
    error: str = ""  # why the status is ERROR
    events: tuple[Event, ...] = ()


class TraceStore:
    """Reads the file in `home`. Raises: sqlite3.Error."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def last_trace_ids(self, count: int = 20) -> list[str]:
        return self._ids("select trace_id from traces order by started_ns desc limit ?", count)

    def slow_trace_ids(self, count: int = 20) -> list[str]:
        return self._ids("select distinct trace_id from requests where slow order by started_ns desc limit ?", count)

    def failed_trace_ids(self, count: int = 20) -> list[str]:
        return self._ids("select distinct trace_id from requests where failed order by started_ns desc limit ?", count)

    def tenant_trace_ids(self, tenant: str, count: int = 20, only: Literal["", "failed", "slow"] = "") -> list[str]:
        """The newest with a request of `tenant`."""
        query = _OF_TENANT.format(f"and {only} " if only else "")
        return self._ids(query, tenant, count)

    def trace(self, prefix: str) -> list[Span]:
        """Spans by start time of the trace whose id or request id starts with `prefix`.

        A client's own request id must be whole.
        """
        after = prefix + "\U0010ffff"
        found = self._ids("select trace_id from traces where trace_id >= ? and trace_id < ? limit 1", prefix, after)
        found = found or self._ids(
            "select trace_id from requests where (request_id >= ? and request_id < ?) or client_request_id = ? "
            "order by started_ns desc limit 1",
            prefix, after, prefix,
        )  # fmt: skip
        if not found:
            return []
        rows = self._rows("select service, spans from pieces where trace_id = ?", (found[0],))
        spans: dict[str, Span] = {}
        for span in (span for service, data in rows for span in read_piece(found[0], service, data)):
            if span.span_id not in spans or LOST not in span.attributes:  # the process may have lived
                spans[span.span_id] = span
        return sorted(spans.values(), key=lambda span: (span.start_ns, -span.end_ns))

    def _ids(self, query: str, *args: str | int) -> list[str]:
        return [row[0] for row in self._rows(query, args)]

    def _rows(self, query: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not self._path.exists():
            return []
        return _when_free(lambda: self._read(query, args))

    def _read(self, query: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        connection = _connect(self._path)
        try:
            return connection.execute(query, args).fetchall()
        except sqlite3.OperationalError as exc:
            if "no such table" in str(exc):  # an earlier release's file, or one that is being made
                return []
            raise
        finally:
            connection.close()


class TraceWriter:
    """Appends to the file in `home`. For one thread at a time."""

    def __init__(self, home: Path, limits: Limits = Limits()) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._path = home / FILE_NAME
        self._limits = limits
        self._connection: sqlite3.Connection | None = None
        self._writes = 0
        self._new_spans = 0  # since the limits of spans and bytes were last checked
        self._new_bytes = 0
        self._seen: OrderedDict[str, None] = OrderedDict()  # traces that the file has, the latest last

    def write(self, service: str, pieces: Sequence[Piece]) -> bool:
        """Returns False if the spans are lost. Every `TRIM_EVERY` writes, trim the file."""
        try:
            _when_free(lambda: self._write(service, pieces))
        except sqlite3.Error as exc:
            lost = sum(piece.num_spans for piece in pieces)
            log.warning("spans not kept", extra={"cause": str(exc), "count": lost})
            return False
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, service: str, pieces: Sequence[Piece]) -> None:
        roots = [(piece.trace_id, root) for piece in pieces for root in piece.roots]
        requests = [
            (root.request_id, root.client_request_id, trace_id, root.start_ns, root.failed, root.slow)
            for trace_id, root in roots
        ]
        tenants = [(root.request_id, root.tenant, trace_id) for trace_id, root in roots if root.tenant is not None]
        try:
            connection = self._open()
            with connection:
                connection.executemany(
                    "insert into pieces values (?,?,?,?)", [(p.trace_id, service, p.num_spans, p.spans) for p in pieces]
                )
                connection.executemany(
                    _ADD_TRACE,
                    [
                        (p.trace_id, p.start_ns, any(map(_is_special, p.roots)))
                        for p in pieces
                        if p.roots or p.trace_id not in self._seen
                    ],
                )
                connection.executemany("insert or replace into requests values (?,?,?,?,?,?)", requests)
                connection.executemany("insert or replace into tenants values (?,?,?)", tenants)
                if (self._writes + 1) % TRIM_EVERY == 0:
                    self._trim(connection)
        except sqlite3.Error:
            self.close()  # the next write opens the file again: it may have been replaced
            raise
        self._writes += 1
        self._seen.update(dict.fromkeys(piece.trace_id for piece in pieces))
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        self._new_spans += sum(piece.num_spans for piece in pieces)
        self._new_bytes += sum(len(piece.spans) for piece in pieces)

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Spans and bytes are counted only after a tenth of their limits was added: that reads all pieces."""
        limits = self._limits
        for special in (0, 1):
            oldest = connection.execute(_OLDEST, (special, limits.traces)).fetchall()
            for table in TABLES:
                connection.executemany(f"delete from {table} where trace_id = ?", oldest)  # noqa: S608 - of ours
        if 10 * self._new_spans >= limits.spans or 10 * self._new_bytes >= limits.bytes:
            _trim_pieces(connection, limits)
            self._new_spans = self._new_bytes = 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            with suppress(OSError):  # SQLite's own error says more
                self._path.touch(mode=0o600)
                self._path.chmod(0o600)  # also for an earlier run's file; SQLite's other files inherit the mode
            self._seen.clear()
            self._connection = _connect(self._path)
            self._connection.executescript(_SCHEMA)
        return self._connection


def read_piece(trace_id: str, service: str, data: bytes) -> list[Span]:
    """The spans of a piece in either form. None if a sender wrote something else."""
    try:
        if data[:1] >= PACKED_FIRST:
            return [_unpacked(trace_id, service, span) for span in unpack_spans(data)]
        return decode_spans(service, data)
    except (DecodeError, msgspec.DecodeError):
        log.warning("spans that cannot be read were left out", extra={"service": service, "trace_id": trace_id})
        return []


def _unpacked(trace_id: str, service: str, span: PackedSpan) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=f"{span.span_id:016x}",
        parent_id=f"{span.parent_id:016x}" if span.parent_id else None,
        service=service,
        name=span.name,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=STATUS[span.status] if 0 <= span.status < len(STATUS) else "UNSET",
        attributes=span.attributes,
        error=span.error,
        events=tuple(Event(*event) for event in span.events),
    )


def decode_spans(service: str, data: bytes) -> list[Span]:
    """`data`: elements of OTLP's `ScopeSpans.spans`."""
    return [_decoded(service, span) for span in trace_pb2.ScopeSpans.FromString(data).spans]


def _decoded(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        service=service,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=STATUS[span.status.code] if span.status.code < len(STATUS) else "UNSET",
        attributes={attribute.key: plain(attribute.value) for attribute in span.attributes},
        error=span.status.message,
        events=tuple(
            Event(event.name, event.time_unix_nano, {a.key: plain(a.value) for a in event.attributes})
            for event in span.events
        ),
    )


def plain(value: AnyValue) -> Any:
    """An OTLP value as JSON has it."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: plain(item.value) for item in value.kvlist_value.values}
    found = getattr(value, kind)
    return found.hex() if isinstance(found, bytes) else found


def _is_special(root: Root) -> bool:
    return root.failed or root.slow or root.moved


def _trim_pieces(connection: sqlite3.Connection, limits: Limits) -> None:
    connection.execute(_TRIM_PIECES, (limits.spans,))
    while connection.execute(_USED_BYTES).fetchone()[0] > limits.bytes:
        count = connection.execute(_COUNT).fetchone()[0]
        connection.execute(_TRIM_PIECES, (count * 3 // 4,))
        if count < 4:
            break
    for table in TABLES[1:]:
        connection.execute(f"delete from {table} where trace_id not in (select trace_id from pieces)")  # noqa: S608 - of ours


def _when_free(work: Callable[[], T]) -> T:
    """Repeat `work` while another process holds the lock.

    sqlite3's timeout does not cover several processes that create the file and switch it to WAL.
    """
    until = monotonic() + BUSY_S
    while True:
        try:
            return work()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or monotonic() > until:
                raise
        sleep(BUSY_RETRY_S)


def _connect(path: Path) -> sqlite3.Connection:
    # WAL lets several processes write beside a reader
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=off")
    except sqlite3.Error:
        connection.close()
        raise
    return connection
