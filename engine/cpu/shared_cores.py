"""Workers on one machine lend each other idle cores through a small shared file.

A worker with new work waits until its cores are returned, because one thread too many makes steps five times as long.

Only a worker without work lends its cores. A step with prompts borrows them at once, and may return them between layers.
Decodes are limited by memory, so they borrow only from workers that have been idle for a while, for the whole step.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

SLOTS: Final = 64  # workers on one machine
ROWS: Final = 4
SILENT_NS: Final = 2 * 10**9  # after which a busy worker may have been killed
RESTED_NS: Final = 10**8
LOOK_S: Final = 3e-4  # polling interval while waiting for own cores
PATIENCE_NS: Final = 10**9  # duration of a step after which its worker may be stopped


class SharedCores:
    """One worker's view of the file: int64 [ROWS, SLOTS].

    Rows: start of the latest step, cores in use, allowed cores, maximum cores. Times are monotonic ns; negative: idle
    since then; 0: no work yet. If "allowed" is 0, the number is fixed. A worker locks its slot's first byte.

    Args:
        cores: number of all cores.
        least: this worker's cores if no slot is free.
        spared: returns how many cores to leave to a process that does not take part.

    Raises: OSError.
    """

    def __init__(self, path: Path, cores: int, least: int, spared: Callable[[], int] = lambda: 0) -> None:
        self._spared = spared
        self._cores = cores
        self._least = least
        self._adapts = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, ROWS * SLOTS * 8)
        self._memory = mmap.mmap(self._file, ROWS * SLOTS * 8)
        self._cells = memoryview(self._memory).cast("q")
        self._since, self._used, self._allowed, self._most = (
            self._cells[row * SLOTS : (row + 1) * SLOTS] for row in range(ROWS)
        )
        self._mine = next((slot for slot in range(SLOTS) if self._lock(slot)), None)  # None: more workers than slots
        self._write(0)  # clear the values of the slot's last owner

    @property
    def cores(self) -> int:
        return self._cores

    def cells(self) -> tuple[memoryview, memoryview] | None:
        """Return the cells of allowed cores, which a running step reads, and of used ones, which it writes."""
        if self._mine is None:
            return None
        return self._allowed[self._mine : self._mine + 1], self._used[self._mine : self._mine + 1]

    def adapt(self) -> None:
        """Call it if the kernels follow `cells` during a step."""
        self._adapts = True

    def ask(self, *, prompts: bool, most: int | None = None) -> int:
        """Return the threads of a step that begins now and ends with `done`; 0: call again after `LOOK_S`."""
        mine, most = self._mine, self._cores if most is None else most
        if mine is None:
            return min(self._least, most)
        if self._used[mine]:
            return self._used[mine]  # the step has already begun
        now = time.monotonic_ns()
        if self._since[mine] <= 0:
            self._since[mine] = now  # only for other workers to read
        rested = now - (0 if prompts else RESTED_NS)
        others = [slot for slot, since in enumerate(self._since) if since and self._needs(slot, since, now, rested)]
        cores = self._cores - self._spared()
        share = max(1, cores // (1 + len(others)))
        if self._waits(others, share, now):
            return 0
        threads, adapts = share, prompts and self._adapts
        if adapts:
            busy = (slot for slot in others if self._since[slot] > 0)
            threads = max(threads, cores - sum(self._used[slot] or share for slot in busy))
        threads = min(threads, most)
        self._most[mine] = most
        self._allowed[mine] = threads if adapts else 0
        self._since[mine] = now
        self._used[mine] = threads
        return threads

    def done(self) -> None:
        mine = self._mine
        if mine is None or not self._used[mine]:
            return
        self._allowed[mine] = self._used[mine] = 0

    def rest(self) -> None:
        self.done()
        if self._mine is not None and self._since[self._mine] > 0:
            self._write(-time.monotonic_ns())
            self._lend()

    def close(self) -> None:
        self._write(0)
        for view in (self._since, self._used, self._allowed, self._most, self._cells):
            view.release()
        self._memory.close()  # the mapping has its own descriptor, which also keeps the lock
        os.close(self._file)

    def _write(self, since: int) -> None:
        if self._mine is not None:
            self._since[self._mine] = since
            self._used[self._mine] = self._allowed[self._mine] = 0

    def _needs(self, slot: int, since: int, now: int, rested: int) -> bool:
        """Return whether the slot is another worker's that has work, or had work after `rested`."""
        if slot == self._mine:
            return False
        if since < 0:
            return -since > rested
        return now - since < SILENT_NS or not self._is_gone(slot)  # a step may take long

    def _waits(self, others: list[int], share: int, now: int) -> bool:
        """Request our cores back. Return whether others' steps still use them."""
        waits = False
        for slot in others:
            if self._allowed[slot] > share:  # noqa: PLR1730  # otherwise do not write, because its step may be ending or beginning
                self._allowed[slot] = share
            waits |= self._used[slot] > share and not self._is_late(slot, now)
        return waits

    def _is_late(self, slot: int, now: int) -> bool:
        return now - self._since[slot] > PATIENCE_NS or self._is_gone(slot)

    def _lend(self) -> None:
        free = self._cores - self._spared() - sum(self._used)
        now = time.monotonic_ns()
        takers = (slot for slot, allowed in enumerate(self._allowed) if allowed and self._used[slot])
        slot = next((slot for slot in takers if not self._is_late(slot, now)), None)
        if slot is not None and free > 0:
            self._allowed[slot] = min(self._used[slot] + free, self._most[slot])

    def _is_gone(self, slot: int) -> bool:
        if not self._lock(slot):
            return False
        self._since[slot] = self._used[slot] = self._allowed[slot] = 0
        self._unlock(slot)
        return True

    def _lock(self, slot: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, slot))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, slot: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, slot))


def _range(kind: int, slot: int) -> bytes:
    """Return the `struct flock` of a slot's first byte."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, slot * 8, 1, 0)
