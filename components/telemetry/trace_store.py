"""The latest traces in one SQLite file per host, for `python -m services.inspect trace`."""

import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S: Final = 5.0  # another process may hold the lock this long
BUSY_RETRY_S: Final = 0.01
KEPT_TRACES: Final = 1000
KEPT_SPANS: Final = 50_000  # a client may put many requests into one trace
KEPT_BYTES: Final = 64 << 20
TRIM_EVERY: Final = 50  # exports; a trim reads the whole index
ATTRIBUTE_CHARS: Final = 8192  # some attributes hold clients' data
FILE_NAME: Final = "traces.sqlite"

_SCHEMA: Final = """
create table if not exists spans (
    trace_id text not null, span_id text not null, parent_id text, service text not null, name text not null,
    start_ns integer not null, end_ns integer not null, status text not null, attributes text not null
);
create index if not exists spans_by_trace on spans (trace_id, start_ns);
"""
_TRIM_TRACES: Final = """
delete from spans where trace_id in (
    select trace_id from spans group by trace_id order by min(start_ns) desc limit -1 offset ?)
"""
_TRIM_SPANS: Final = "delete from spans where rowid <= (select rowid from spans order by rowid desc limit 1 offset ?)"
_COUNT: Final = "select count(*) from spans"
_USED_BYTES: Final = """
select (page_count - freelist_count) * page_size from pragma_page_count, pragma_freelist_count, pragma_page_size
"""


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
    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def last_trace_ids(self, count: int = 20) -> list[str]:
        query = "select trace_id from spans group by trace_id order by min(start_ns) desc limit ?"
        return [row[0] for row in self._rows(query, (count,))]

    def trace(self, prefix: str) -> list[Span]:
        """Spans by start time of the trace whose id or request id starts with `prefix`.

        A client's own request id must be whole.
        """
        found = self._rows("select trace_id from spans where trace_id like ? limit 1", (f"{prefix}%",)) or self._rows(
            "select trace_id from spans where json_extract(attributes, '$.\"kvmesh.request_id\"') like ? "
            "or json_extract(attributes, '$.\"kvmesh.client_request_id\"') = ? order by start_ns desc limit 1",
            (f"{prefix}%", prefix),
        )
        if not found:
            return []
        rows = self._rows("select * from spans where trace_id = ? order by start_ns, end_ns desc", (found[0][0],))
        return [Span(*row[:8], json.loads(row[8])) for row in rows]  # type: ignore[call-arg]

    def _rows(self, query: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not self._path.exists():
            return []
        return _when_free(lambda: self._read(query, args))

    def _read(self, query: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        connection = _connect(self._path)
        try:
            return connection.execute(query, args).fetchall()
        finally:
            connection.close()


class TraceStoreExporter(SpanExporter):
    """Appends spans on the batch processor's thread. A failed write loses its spans only."""

    def __init__(self, home: Path, service: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._path = home / FILE_NAME
        self._service = service
        self._connection: sqlite3.Connection | None = None
        self._exports = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one batch. Every `TRIM_EVERY` exports, trim the file."""
        rows = [row for span in spans if (row := self._row(span)) is not None]
        try:
            _when_free(lambda: self._write(rows))
        except sqlite3.Error as exc:
            log.warning("spans not kept", extra={"cause": str(exc), "count": len(rows)})
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        try:
            connection = self._open()
            with connection:
                connection.executemany("insert into spans values (?,?,?,?,?,?,?,?,?)", rows)
                if (self._exports + 1) % TRIM_EVERY == 0:
                    _trim(connection)
        except sqlite3.Error:
            self.shutdown()  # the next write opens the file again: it may have been replaced
            raise
        self._exports += 1

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            with suppress(OSError):  # SQLite's own error says more
                self._path.touch(mode=0o600)
                self._path.chmod(0o600)  # also for an earlier run's file; SQLite's other files inherit the mode
            self._connection = _connect(self._path)
            self._connection.executescript(_SCHEMA)
        return self._connection

    def _row(self, span: ReadableSpan) -> tuple[Any, ...] | None:
        context = span.get_span_context()
        if context is None or span.start_time is None or span.end_time is None:
            return None
        return (
            f"{context.trace_id:032x}",
            f"{context.span_id:016x}",
            None if span.parent is None else f"{span.parent.span_id:016x}",
            self._service,
            span.name,
            span.start_time,
            span.end_time,
            span.status.status_code.name,
            json.dumps({name: _shortened(value) for name, value in (span.attributes or {}).items()}, default=str),
        )


def _trim(connection: sqlite3.Connection) -> None:
    connection.execute(_TRIM_TRACES, (KEPT_TRACES,))
    connection.execute(_TRIM_SPANS, (KEPT_SPANS,))
    while connection.execute(_USED_BYTES).fetchone()[0] > KEPT_BYTES:
        count = connection.execute(_COUNT).fetchone()[0]
        connection.execute(_TRIM_SPANS, (count * 3 // 4,))
        if count < 4:
            return


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


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:ATTRIBUTE_CHARS]
    if isinstance(value, Sequence) and len(json.dumps(value, default=str)) > ATTRIBUTE_CHARS:
        return json.dumps(value, default=str)[:ATTRIBUTE_CHARS]
    return value


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
