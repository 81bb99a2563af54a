"""The SQLite file of spans: several processes of a host share it.

No write waits for the disk, so a power failure may damage the file. A writer then moves it aside and begins a new one.
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
DAMAGED_NAME: Final = "traces.damaged.sqlite"  # the last damaged file; an older one is replaced
DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
BUSY_S: Final = 5.0  # another process may hold the lock this long
BUSY_RETRY_S: Final = 0.01


class Damaged(sqlite3.DatabaseError):
    """SQLite's check found a fault."""

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
    """Whether the file itself is at fault, and not its place or another process."""
    return _code(exc) in DAMAGE


def _code(exc: sqlite3.Error) -> int:
    """SQLite's primary code. Python's own errors have none. Here only a text that is not UTF-8 raises one, hence damage."""
    return getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


@contextmanager
def held_in_place(path: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Keep the file and SQLite's files beside it together: no process opens them while they are moved (LOCK_EX).

    Without this, a new file could get the log of the damaged one.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError:  # SQLite's own error says more
        yield
        return
    try:
        fcntl.flock(folder, how)
        yield
    finally:
        os.close(folder)


def connect(path: Path) -> sqlite3.Connection:
    # WAL lets several processes write beside a reader
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=off")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def inode_of(path: Path) -> int:
    """0: there is no such file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def move_aside(path: Path, inode: int, cause: str) -> bool:
    """Rename the damaged file, unless another process has done so. Returns whether a write may succeed now.

    Args:
        inode: of the file that was found to be damaged.
    """
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
            log.warning("the damaged file of traces cannot be moved aside", extra=extra)
            return False
    extra = {"file": str(path), "cause": cause, "moved_to": str(kept)}
    log.warning("the file of traces was damaged: it is moved aside, and a new one begins", extra=extra)
    return True
