"""The cores of one machine, lent among its workers: who has work takes those that nobody else needs.

Two workers with two threads each on two cores collapse under load, because OpenMP's threads spin at each barrier for one that
has no core; with one thread each, half the machine idles while only one of them has work. So each worker says in a small
shared file whether it has work, and looks there before each step.

A step with prompts takes idle cores at once. Decodes wait for memory more than for cores, and take them from those who have
rested for a while. Whoever has new work waits until its cores are back, that is, for the step that has them: one thread too
many makes steps five times as long (measured: 512 tokens, 823 ms for 150).
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SLOTS: Final = 64  # workers on one machine
SILENT_NS: Final = 2 * 10**9  # after which one that has work is looked at: was it killed?
RESTED_NS: Final = 10**8
LOOK_S: Final = 1e-4  # how often one that waits for its cores looks whether they are back
PATIENCE_NS: Final = 10**9  # for a step that does not end: its worker may be stopped


class SharedCores:
    """One worker's view of the file: int64 [2, SLOTS], when each began its latest step, and the cores it uses for it.

    Times are in ns of the monotonic clock; negative: since when it rests; 0: it never had work. A slot is held by a lock on
    its first byte, which the kernel lets go of when its holder ends, whatever it dies of.
    """

    def __init__(self, path: Path, cores: int, least: int) -> None:
        """Take part with `cores` in all, of which this worker has `least` whatever others do. Raises: OSError."""
        self._cores = cores
        self._least = least
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, 2 * SLOTS * 8)
        self._memory = mmap.mmap(self._file, 2 * SLOTS * 8)
        self._since = memoryview(self._memory)[: SLOTS * 8].cast("q")
        self._used = memoryview(self._memory)[SLOTS * 8 :].cast("q")
        self._mine = next((slot for slot in range(SLOTS) if self._lock(slot)), None)  # None: more workers than slots
        self._write(0)  # whatever the last holder left

    @contextmanager
    def step(self, *, prompts: bool) -> Iterator[int]:
        """For the time of a step, with prompts or of decodes alone: how many threads it may use."""
        if self._mine is None:
            yield self._least
            return
        now = time.monotonic_ns()
        self._write(now)
        rested = now - (0 if prompts else RESTED_NS)
        others = [slot for slot, since in enumerate(self._since) if since and self._needs(slot, since, now, rested)]
        share = self._cores // (1 + len(others))
        threads = max(self._least, share)
        while any(self._uses_more(slot, share) for slot in others):
            time.sleep(LOOK_S)
        self._used[self._mine] = threads
        try:
            yield threads
        finally:
            self._used[self._mine] = 0

    def rest(self) -> None:
        """There is no work for now."""
        if self._mine is not None and self._since[self._mine] > 0:
            self._write(-time.monotonic_ns())

    def close(self) -> None:
        """Leave."""
        self._write(0)
        self._since.release()
        self._used.release()
        self._memory.close()  # it has a descriptor of its own, and the lock lasts until both are closed
        os.close(self._file)

    def _write(self, since: int) -> None:
        if self._mine is not None:
            self._since[self._mine] = since
            self._used[self._mine] = 0

    def _needs(self, slot: int, since: int, now: int, rested: int) -> bool:
        """Whether somebody else has work, or had after `rested`."""
        if slot == self._mine:
            return False
        if since < 0:
            return -since > rested
        return now - since < SILENT_NS or not self._is_gone(slot)  # a step may take long

    def _uses_more(self, slot: int, share: int) -> bool:
        """Whether somebody else's step has cores that are ours now: it began when we had no work."""
        late = time.monotonic_ns() - self._since[slot] > PATIENCE_NS
        return self._used[slot] > max(share, 1) and not late and not self._is_gone(slot)

    def _is_gone(self, slot: int) -> bool:
        """Whether nobody holds the slot any more; what stood there is wiped."""
        if not self._lock(slot):
            return False
        self._since[slot] = self._used[slot] = 0
        self._unlock(slot)
        return True

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
