"""The cores of one machine, shared among its workers: who has work takes those that nobody else needs.

Two workers with two threads each on two cores collapse under load, because OpenMP's threads spin at each barrier for one that
has no core; with one thread each, half the machine idles while only one of them has work. So each worker says in a small
shared file whether it has work, and looks there before each step.
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


class SharedCores:
    """One worker's view of the file: int64 [SLOTS], when each last began a step, in ns of the monotonic clock; 0: it rests.

    A slot is held by a lock on its first byte, which the kernel lets go of when its holder ends, whatever it dies of.
    """

    def __init__(self, path: Path, cores: int, least: int) -> None:
        """Take part with `cores` in all, of which this worker has `least` whatever others do. Raises: OSError."""
        self._cores = cores
        self._least = least
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, SLOTS * 8)
        self._memory = mmap.mmap(self._file, SLOTS * 8)
        self._began = memoryview(self._memory).cast("q")
        self._mine = next((slot for slot in range(SLOTS) if self._lock(slot)), None)
        self.rest()

    def take(self) -> int:
        """A step begins. Returns: how many threads it may use."""
        if self._mine is None:  # more workers than slots
            return self._least
        now = time.monotonic_ns()
        self._began[self._mine] = now
        others = sum(1 for slot, began in enumerate(self._began) if began and self._works(slot, began, now))
        return max(self._least, self._cores // (1 + others))

    def rest(self) -> None:
        """There is no work for now."""
        if self._mine is not None:
            self._began[self._mine] = 0

    def close(self) -> None:
        """Leave."""
        self.rest()
        self._began.release()
        self._memory.close()
        os.close(self._file)

    def _works(self, slot: int, began: int, now: int) -> bool:
        """Whether another one's slot says the truth."""
        if slot == self._mine:
            return False
        if now - began < SILENT_NS or not self._lock(slot):  # a step may take long
            return True
        self._began[slot] = 0
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
