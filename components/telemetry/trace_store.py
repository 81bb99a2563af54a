"""Finished spans in one SQLite file, written by each process of a host, or by the observer for several hosts.

A batch is what one process exported together: spans of a few hundred traces at most, stored unchanged. No column has an index,
so a write only appends, at a few microseconds a trace in a busy mesh. A reader scans a few thousand small rows.
"""

import logging
import sqlite3
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from components.telemetry.stored_spans import Span, read_piece
from components.telemetry.trace_file import (
    FILE_NAME,
    Damaged,
    connect,
    held_in_place,
    inode_of,
    is_damage,
    move_aside,
    when_free,
)
from components.telemetry.trace_pieces import LOST, Piece, Root, pack_batch, unpack_batch

log = logging.getLogger(__name__)

Which = Literal["recent", "slow", "failed"]
WHICH: Final[tuple[Which, ...]] = get_args(Which)
TRIM_EVERY: Final = 50  # writes
TABLES: Final = ("batches", "batch_spans", "roots")
EARLIER: Final = ("spans", "pieces", "traces", "requests", "tenants")  # tables of earlier releases
ID_CHARS: Final = 32  # of a trace id; `trace_ids` of a batch concatenates them

_SCHEMA: Final = """
create table if not exists batches (
    batch integer primary key, service text not null, num_spans integer not null, trace_ids text not null,
    thinned integer not null default 0
);
create table if not exists batch_spans (batch integer primary key, packed blob not null);
create table if not exists roots (
    batch integer not null, request_id text not null, client_request_id text, trace_id text not null, tenant text,
    started_ns integer not null, failed integer not null, slow integer not null, special integer not null
);
""" + "".join(f"drop table if exists {name};" for name in EARLIER)
_ADD_BATCH: Final = "insert into batches (service, num_spans, trace_ids) values (?, ?, ?)"
_ADD_ROOT: Final = "insert into roots values (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ROOTS: Final = "select distinct trace_id from roots where {} order by started_ns desc limit ?"
_CONDITIONS: Final[Mapping[Which, str]] = {"recent": "true", "slow": "slow", "failed": "failed"}
_PIECES: Final = "select service, packed from batches join batch_spans using (batch) where batch in ({}) order by batch"
_NEWEST_FIRST: Final = "select batch, thinned, trace_ids from batches order by batch desc"
_DELETE_ROOTS: Final = """
delete from roots where batch not in (select batch from batches) or (
    batch in (select batch from batches where thinned) and trace_id not in (select trace_id from roots where special))
"""
_THIN: Final = "update batches set thinned = 1, num_spans = ?, trace_ids = ? where batch = ?"
_LAST_TOO_MANY: Final = """
select max(batch) from (select batch, sum(num_spans) over (order by batch desc) as total from batches)
where total > ? and batch < (select max(batch) from batches)
"""
# Traces of the older half may have lost their roots with deleted batches.
_NEWER: Final = """
select trace_ids from batches where batch > (
    select case when min(batch) = 1 then 0 else (min(batch) + max(batch)) / 2 end from batches where not thinned
) order by batch desc
"""
_COUNT: Final = "select coalesce(sum(num_spans), 0) from batches"
_USED_BYTES: Final = """
select (page_count - freelist_count) * page_size from pragma_page_count, pragma_freelist_count, pragma_page_size
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond these the oldest traces are deleted. Failed, moved and slow ones are counted separately."""

    traces: int = 1000
    spans: int = 50_000  # one trace may have many requests
    bytes: int = 64 << 20


class TraceStore:
    """Reads the file in `home`. Raises: sqlite3.Error."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def last_trace_ids(self, count: int = 20) -> list[str]:
        """The traces with the latest spans first."""
        found: dict[str, None] = {}
        for (trace_ids,) in self._rows("select trace_ids from batches order by batch desc", ()):
            found.update(dict.fromkeys(reversed(_split(trace_ids))))
            if len(found) >= count:  # a trace may be in several batches
                break
        return list(found)[:count]

    def trace_ids(self, which: Which, count: int = 20, tenant: str | None = None) -> list[str]:
        """The traces with a request of `tenant`, or of any, latest first."""
        if tenant is not None:
            return self._ids(_ROOTS.format(f"tenant = ? and {_CONDITIONS[which]}"), tenant, count)
        if which == "recent":
            return self.last_trace_ids(count)
        return self._ids(_ROOTS.format(_CONDITIONS[which]), count)

    def has_roots(self) -> bool:
        """Return whether a frontend writes to this file."""
        return bool(self._ids("select trace_id from roots limit 1"))

    def rootless_ids(self, count: int) -> list[str]:
        """The traces without a request's root, latest first: running ones, or those whose frontend was lost."""
        rooted = set(self._ids("select distinct trace_id from roots"))
        batches = self._rows(_NEWER, ()) if rooted else []
        found = dict.fromkeys(id_ for (ids,) in batches for id_ in reversed(_split(ids)) if id_ not in rooted)
        return list(found)[:count]

    def trace(self, prefix: str) -> list[Span]:
        """The spans, by start time, of the trace whose id or request id starts with `prefix`.

        A client's own request id must be whole.
        """
        after = prefix + "\U0010ffff"
        found = [id_ for _, ids in self._containing(prefix) for id_ in ids if id_.startswith(prefix)] or self._ids(
            _ROOTS.format("(request_id >= ? and request_id < ?) or client_request_id = ?"), prefix, after, prefix, 1
        )
        return self.traces(found[:1])[found[0]] if found else []

    def traces(self, trace_ids: Sequence[str]) -> dict[str, list[Span]]:
        """The spans of each trace by start time; none if it was deleted."""
        found: dict[str, dict[str, Span]] = {trace_id: {} for trace_id in trace_ids}
        one = trace_ids[0] if len(trace_ids) == 1 else ""
        batches = [batch for batch, ids in self._containing(one) if not found.keys().isdisjoint(ids)]
        for service, packed in self._rows(_PIECES.format(",".join(map(str, batches))), ()):
            for piece in _pieces(packed):
                if (spans := found.get(piece.trace_id)) is None:
                    continue
                for span in read_piece(piece.trace_id, service, piece.spans):
                    # a process's own span is better than its caller's record
                    if span.span_id not in spans or LOST not in span.attributes:
                        spans[span.span_id] = span
        return {
            trace_id: sorted(spans.values(), key=lambda span: (span.start_ns, -span.end_ns))
            for trace_id, spans in found.items()
        }

    def _containing(self, text: str) -> list[tuple[int, list[str]]]:
        """Batches, each with all its trace ids."""
        rows = self._rows("select batch, trace_ids from batches where instr(trace_ids, ?)", (text,))
        return [(batch, _split(trace_ids)) for batch, trace_ids in rows]

    def _ids(self, query: str, *args: str | int) -> list[str]:
        return [row[0] for row in self._rows(query, args)]

    def _rows(self, query: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not self._path.exists():
            return []
        return when_free(lambda: self._read(query, args))

    def _read(self, query: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with held_in_place(self._path):
            connection = connect(self._path)
        try:
            return connection.execute(query, args).fetchall()
        except sqlite3.OperationalError as exc:
            if "no such table" in str(exc):  # a new file, or an earlier release's
                return []
            raise
        finally:
            connection.close()


class TraceWriter:
    """Appends to the file in `home`, and creates it. Use it on one thread at a time.

    An unusable folder only costs spans, because with an observer a process needs no file.
    """

    def __init__(self, home: Path, limits: Limits = Limits()) -> None:
        self._path = home / FILE_NAME
        self._limits = limits
        self._connection: sqlite3.Connection | None = None
        self._inode = 0  # of the file that is open or could not be opened
        self._checked_inode = 0
        self._writes = 0

    def write(self, service: str, pieces: Sequence[Piece]) -> bool:
        """False: the spans are lost."""
        try:
            try:
                when_free(lambda: self._write(service, pieces))
            except sqlite3.Error as exc:
                if not (is_damage(exc) and move_aside(self._path, self._inode, str(exc))):
                    raise
                when_free(lambda: self._write(service, pieces))
        except sqlite3.Error as exc:
            lost = sum(piece.num_spans for piece in pieces)
            log.warning("spans not kept", extra={"cause": str(exc), "file": str(self._path), "count": lost})
            return False
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, service: str, pieces: Sequence[Piece]) -> None:
        try:
            connection = self._open()
            with connection:
                if pieces:
                    _add(connection, service, pieces)
                if (self._writes + 1) % TRIM_EVERY == 0:
                    _trim(connection, self._limits)
        except sqlite3.Error:
            self.close()  # the next write reopens the file, perhaps a new one
            raise
        self._writes += 1

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._inode != inode_of(self._path):
            self.close()  # otherwise spans would be written to a deleted file
        if self._connection is None:
            with suppress(OSError):  # SQLite's own error is clearer
                self._path.parent.mkdir(parents=True, exist_ok=True)
            with held_in_place(self._path):
                with suppress(OSError):
                    self._path.touch(mode=0o600)
                    self._path.chmod(0o600)  # an existing file, too; SQLite's others inherit the mode
                self._inode = inode_of(self._path)
                self._connection = connect(self._path)
            self._check(self._connection)
            self._connection.executescript(_SCHEMA)
        return self._connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """Without this check, only readers might notice damage. Raises: sqlite3.Error, if the file is damaged."""
        if self._inode != self._checked_inode:
            [(found,)] = connection.execute("pragma quick_check(1)").fetchall()
            if found != "ok":
                raise Damaged(found)
            self._checked_inode = self._inode


def _add(connection: sqlite3.Connection, service: str, pieces: Sequence[Piece]) -> None:
    batch = connection.execute(_ADD_BATCH, (service, *_contents(pieces))).lastrowid
    connection.execute("insert into batch_spans values (?, ?)", (batch, pack_batch(pieces)))
    roots = [(piece.trace_id, root) for piece in pieces for root in piece.roots]
    connection.executemany(_ADD_ROOT, [_root(batch, trace_id, root) for trace_id, root in roots])


def _contents(pieces: Sequence[Piece]) -> tuple[int, str]:
    """The number of spans, and `trace_ids`."""
    return sum(piece.num_spans for piece in pieces), "".join(dict.fromkeys(piece.trace_id for piece in pieces))


def _root(batch: int | None, trace_id: str, root: Root) -> tuple[int | str | None, ...]:
    special = root.failed or root.slow or root.moved
    ids = root.request_id, root.client_request_id, trace_id, root.tenant
    return batch, *ids, root.start_ns, root.failed, root.slow, special


def _split(trace_ids: str) -> list[str]:
    return [trace_ids[at : at + ID_CHARS] for at in range(0, len(trace_ids), ID_CHARS)]


def _trim(connection: sqlite3.Connection, limits: Limits) -> None:
    _trim_traces(connection, limits.traces)
    _delete_beyond(connection, limits.spans)
    while connection.execute(_USED_BYTES).fetchone()[0] > limits.bytes:
        count = connection.execute(_COUNT).fetchone()[0]
        if not _delete_beyond(connection, count * 3 // 4):
            break


def _trim_traces(connection: sqlite3.Connection, most: int) -> None:
    """Keep the batches of the newest `most` traces, and of older ones only the newest `most` special traces."""
    special_ids = {trace_id for (trace_id,) in connection.execute("select trace_id from roots where special")}
    ordinary: set[str] = set()  # kept so far, newest first
    special: set[str] = set()
    for batch, was_thinned, text in connection.execute(_NEWEST_FIRST).fetchall():
        trace_ids = set(_split(text))
        of_special = trace_ids & special_ids if len(special) < most else set()
        if of_special != trace_ids if was_thinned else len(ordinary) >= most:
            _thin(connection, batch, of_special)
        ordinary |= trace_ids - special_ids
        special |= of_special
    connection.execute(_DELETE_ROOTS)


def _thin(connection: sqlite3.Connection, batch: int, kept_ids: Set[str]) -> None:
    if not kept_ids:
        connection.execute("delete from batches where batch = ?", (batch,))
        connection.execute("delete from batch_spans where batch = ?", (batch,))
        return
    rows = connection.execute("select packed from batch_spans where batch = ?", (batch,)).fetchall()
    kept = [piece for (packed,) in rows for piece in _pieces(packed) if piece.trace_id in kept_ids]
    if not kept:  # unreadable, or lost in a power failure
        _thin(connection, batch, frozenset())
        return
    connection.execute(_THIN, (*_contents(kept), batch))
    connection.execute("update batch_spans set packed = ? where batch = ?", (pack_batch(kept), batch))


def _pieces(packed: bytes) -> list[Piece]:
    """A batch's pieces; none if a power failure damaged it, or another release wrote it."""
    try:
        return unpack_batch(packed)
    except msgspec.DecodeError:
        log.warning("an unreadable batch of spans was skipped")
        return []


def _delete_beyond(connection: sqlite3.Connection, num_spans: int) -> bool:
    """Keep the newest batches up to a total of `num_spans`, and at least one. Return whether any were deleted."""
    last = connection.execute(_LAST_TOO_MANY, (num_spans,)).fetchone()[0]
    if last is not None:
        for table in TABLES:
            connection.execute(f"delete from {table} where batch <= ?", (last,))  # noqa: S608 - of ours
    return last is not None
