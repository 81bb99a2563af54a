"""The cores of one machine, lent among its workers: who has work takes those that nobody else needs.

Two workers with two threads each on two cores collapse under load, because OpenMP's threads spin at each barrier for one that
has no core; with one thread each, half the machine idles while only one of them has work. So each worker says in a small
shared file whether it has work, and looks there before each step.

A step with prompts takes idle cores at once. Decodes wait for memory more than for cores, and take them from those who have
rested for a while: else the next prompt would find its cores taken, and a step with more threads than cores is slow for both.
"""

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

SLOTS: Final = 64  # workers on one machine
SILENT_NS: Final = 2 * 10**9  # after which one that has work is looked at: was it killed?
RESTED_NS: Final = 10**8


class SharedCores:
    """One worker's view of the file: int64 [SLOTS], when each began its latest step, in ns of the monotonic clock.

    Negative: since when it rests; 0: it never had work. A slot is held by a lock on its first byte, which the kernel lets
    go of when its holder ends, whatever it dies of.
    """

    def __init__(self, path: Path, cores: int, least: int) -> None:
        """Take part with `cores` in all, of which this worker has `least` whatever others do. Raises: OSError."""
        self._cores = cores
        self._least = least
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, SLOTS * 8)
        self._memory = mmap.mmap(self._file, SLOTS * 8)
        self._since = memoryview(self._memory).cast("q")
        self._mine = next((slot for slot in range(SLOTS) if self._lock(slot)), None)  # None: more workers than slots
        self._write(0)  # whatever the last holder left

    def take(self, *, prompts: bool) -> int:
        """A step begins, with prompts or of decodes alone. Returns: how many threads it may use."""
        if self._mine is None:
            return self._least
        now = time.monotonic_ns()
        self._write(now)
        rested = now - (0 if prompts else RESTED_NS)
        others = sum(1 for slot, since in enumerate(self._since) if since and self._needs(slot, since, now, rested))
        return max(self._least, self._cores // (1 + others))

    def rest(self) -> None:
        """There is no work for now."""
        if self._mine is not None and self._since[self._mine] > 0:
            self._write(-time.monotonic_ns())

    def close(self) -> None:
        """Leave."""
        self._write(0)
        self._since.release()
        self._memory.close()
        os.close(self._file)

    def _write(self, since: int) -> None:
        if self._mine is not None:
            self._since[self._mine] = since

    def _needs(self, slot: int, since: int, now: int, rested: int) -> bool:
        """Whether somebody else has work, or had after `rested`."""
        if slot == self._mine:
            return False
        if since < 0:
            return -since > rested
        if now - since < SILENT_NS or not self._lock(slot):  # a step may take long
            return True
        self._since[slot] = 0
        self._unlock(slot)
        return False

    def _lock(self, slot: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, slot))
        except (BlockingIOError, PermissionError):  # somebody has it
            return False
        return True

    def _unlock(self, slot: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, slot))


def _range(kind: int, slot: int) -> bytes:
    """`struct flock` of a slot's first byte."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, slot * 8, 1, 0)
