"""The SQLite file of spans, which several processes of a host share.

Writes do not wait for the disk, so a power failure may damage the file. A writer then moves it aside and starts a new one.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE_NAME: Final = "traces.sqlite"
DAMAGED_NAME: Final = "traces.damaged.sqlite"  # the last damaged file
DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
BUSY_S: Final = 5.0  # for the lock
BUSY_RETRY_S: Final = 0.01


class Damaged(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def when_free(work: Callable[[], T]) -> T:
    """Repeat `work` while another process holds the lock.

    sqlite3's timeout does not cover several processes that create the file and switch it to WAL.
    """
    until = monotonic() + BUSY_S
    while True:
        try:
            return work()
        except sqlite3.OperationalError as exc:
            if _code(exc) != sqlite3.SQLITE_BUSY or monotonic() > until:
                raise
        sleep(BUSY_RETRY_S)


def is_damage(exc: sqlite3.Error) -> bool:
    """Return whether the file itself is damaged, unlike a wrong path or a lock."""
    return _code(exc) in DAMAGE


def _code(exc: sqlite3.Error) -> int:
    """SQLite's primary code. Python's own errors have none; here they mean text that is not UTF-8: damage."""
    return getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


@contextmanager
def held_in_place(path: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Lock the folder, so that no process opens the file while it and SQLite's other files are moved (LOCK_EX).

    Else a new file could be combined with the WAL of the damaged one.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError:  # SQLite's own error is clearer
        yield
        return
    try:
        fcntl.flock(folder, how)
        yield
    finally:
        os.close(folder)


def connect(path: Path) -> sqlite3.Connection:
    # with WAL several processes may write while another reads
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=off")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def inode_of(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def move_aside(path: Path, inode: int, cause: str) -> bool:
    """Rename the damaged file, unless another process has replaced `inode`. Return whether a write may succeed now."""
    with held_in_place(path, fcntl.LOCK_EX):
        if inode != inode_of(path):
            return True
        home, kept = path.parent, path.with_name(DAMAGED_NAME)
        try:
            for suffix in ("-wal", "-shm", ""):  # SQLite's other files may be missing
                (home / f"{DAMAGED_NAME}{suffix}").unlink(missing_ok=True)
                with suppress(FileNotFoundError):
                    (home / f"{FILE_NAME}{suffix}").rename(home / f"{DAMAGED_NAME}{suffix}")
        except OSError as exc:
            extra = {"file": str(path), "cause": str(exc)}
            log.warning("the damaged trace file cannot be moved aside", extra=extra)
            return False
    extra = {"file": str(path), "cause": cause, "moved_to": str(kept)}
    log.warning("the trace file was damaged: it was moved aside, and a new one is used", extra=extra)
    return True
