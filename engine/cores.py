"""The cores of one machine, lent among its workers: who has work takes those that nobody else needs.

Two workers with two threads each on two cores collapse under load, because OpenMP's threads spin at each barrier for one that
has no core; with one thread each, half the machine idles while only one of them has work. So each worker says in a small
shared file whether it has work, and looks there before each step.

A step with prompts takes idle cores at once. Decodes wait for memory more than for cores, and take them from those who have
rested for a while. Whoever has new work waits until its cores are back: one thread too many makes steps five times as long
(measured: 512 tokens, 823 ms for 150).

A step with prompts gives cores back while it is under way, between two layers, where the kernels can; any other step when it
ends. So decodes lend their cores to prompts between their steps, too: they pause after each for PAUSE times as long as it
took. Without a pause a prompt beside decodes would take twice as long; if they waited for the whole prompt, the longest time
between two tokens would be a prompt's.
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
SILENT_NS: Final = 2 * 10**9  # after which one that has work is looked at: was it killed?
RESTED_NS: Final = 10**8
LOOK_S: Final = 3e-4  # how often one that waits for its cores looks whether they are back
PAUSED_LOOK_S: Final = 2e-3  # whether a prompt that they made room for is still computed
PATIENCE_NS: Final = 10**9  # for a step that does not end: its worker may be stopped
PAUSE: Final = 0.5  # of decodes while a prompt has their cores, in times of their latest step
LONGEST_PAUSE_NS: Final = 10**8


class SharedCores:
    """One worker's view of the file: int64 [ROWS, SLOTS].

    The rows: when each began its latest step, the cores it uses for it, those it may use from now on, and the most that it
    can use, because processes outside the mesh take the others (`ThreadLimit`). Times are in ns of
    the monotonic clock; negative: since when it rests; 0: it never had work. Allowed are 0 cores where the number is fixed for
    the step. A slot is held by a lock on its first byte, which the kernel lets go of when its holder ends, whatever it dies of.
    """

    def __init__(self, path: Path, cores: int, least: int, spared: Callable[[], int] = lambda: 0) -> None:
        """Take part with `cores` in all; `least` is what this worker has where there is no slot for it. Raises: OSError.

        `spared`: how many cores are to be left alone now, for a process that does not take part.
        """
        self._spared = spared
        self.look_s = LOOK_S  # how long to wait when `ask` said that it is not yet time
        self._cores = cores
        self._least = least
        self._adapts = False
        self._paused_until = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, ROWS * SLOTS * 8)
        self._memory = mmap.mmap(self._file, ROWS * SLOTS * 8)
        self._cells = memoryview(self._memory).cast("q")
        self._since, self._used, self._allowed, self._most = (
            self._cells[row * SLOTS : (row + 1) * SLOTS] for row in range(ROWS)
        )
        self._mine = next((slot for slot in range(SLOTS) if self._lock(slot)), None)  # None: more workers than slots
        self._write(0)  # whatever the last holder left

    @property
    def cores(self) -> int:
        """All that a step can get."""
        return self._cores

    def cells(self) -> tuple[memoryview, memoryview] | None:
        """Where a step under way reads how many threads it may use, and writes how many it does: int64 [1] each.

        Who asks for them says so by `adapt`. None: there are more workers than slots.
        """
        if self._mine is None:
            return None
        return self._allowed[self._mine : self._mine + 1], self._used[self._mine : self._mine + 1]

    def adapt(self) -> None:
        """From now on steps of this worker follow what `cells` says."""
        self._adapts = True

    def ask(self, *, prompts: bool, most: int | None = None) -> int:
        """How many threads a step may use that begins now and ends with `done`; 0: it is not yet time, ask after `look_s`.

        `most`: it can use no more of them, even if they are free.
        """
        mine, most = self._mine, self._cores if most is None else most
        if mine is None:
            return min(self._least, most)
        if self._used[mine]:
            return self._used[mine]  # it has begun
        now = time.monotonic_ns()
        if self._since[mine] <= 0:
            self._since[mine] = now  # those who do not wait for anybody need not be told more often
        rested = now - (0 if prompts else RESTED_NS)
        others = [slot for slot, since in enumerate(self._since) if since and self._needs(slot, since, now, rested)]
        cores = self._cores - self._spared()
        share = max(1, cores // (1 + len(others)))
        if not prompts and self._pauses(others, share, now):
            self.look_s = PAUSED_LOOK_S
            return 0
        if self._waits(others, share, now):
            self.look_s = LOOK_S
            return 0
        threads, adapts = share, prompts and self._adapts
        if adapts:
            threads = max(threads, cores - sum(self._used[slot] for slot in others))
        threads = min(threads, most)
        self._most[mine] = most
        self._allowed[mine] = threads if adapts else 0
        self._since[mine] = now
        self._used[mine] = threads
        return threads

    def done(self) -> None:
        """The step is over, or there will be none: a prompt may have its cores."""
        mine = self._mine
        if mine is None or not self._used[mine]:
            return
        now = time.monotonic_ns()
        prompts = self._allowed[mine] > 0
        self._allowed[mine] = self._used[mine] = 0
        if not prompts:
            self._paused_until = now + min(int(PAUSE * (now - self._since[mine])), LONGEST_PAUSE_NS)
        self._lend()

    def rest(self) -> None:
        """There is no work for now."""
        self.done()
        if self._mine is not None and self._since[self._mine] > 0:
            self._write(-time.monotonic_ns())

    def close(self) -> None:
        """Leave."""
        self._write(0)
        for view in (self._since, self._used, self._allowed, self._most, self._cells):
            view.release()
        self._memory.close()  # it has a descriptor of its own, and the lock lasts until both are closed
        os.close(self._file)

    def _write(self, since: int) -> None:
        if self._mine is not None:
            self._since[self._mine] = since
            self._used[self._mine] = self._allowed[self._mine] = 0

    def _needs(self, slot: int, since: int, now: int, rested: int) -> bool:
        """Whether somebody else has work, or had after `rested`."""
        if slot == self._mine:
            return False
        if since < 0:
            return -since > rested
        return now - since < SILENT_NS or not self._is_gone(slot)  # a step may take long

    def _pauses(self, others: list[int], share: int, now: int) -> bool:
        """Whether a prompt has more than its share, and decodes that have just had a step leave it that."""
        return now < self._paused_until and any(
            self._allowed[slot] > share and not self._is_late(slot, now) for slot in others
        )

    def _waits(self, others: list[int], share: int, now: int) -> bool:
        """Whether somebody else's step has cores that are ours now; a step that can give them back is told to."""
        waits = False
        for slot in others:
            if self._allowed[slot] > share:  # noqa: PLR1730  # else it is not ours to write: its step may be ending or beginning
                self._allowed[slot] = share
            waits |= self._used[slot] > share and not self._is_late(slot, now)
        return waits

    def _is_late(self, slot: int, now: int) -> bool:
        """Whether its step is not to be waited for."""
        return now - self._since[slot] > PATIENCE_NS or self._is_gone(slot)

    def _lend(self) -> None:
        """Give the cores that nobody uses to a step that can take them."""
        free = self._cores - self._spared() - sum(self._used)
        now = time.monotonic_ns()
        takers = (slot for slot, allowed in enumerate(self._allowed) if allowed and self._used[slot])
        slot = next((slot for slot in takers if not self._is_late(slot, now)), None)
        if slot is not None and free > 0:
            self._allowed[slot] = min(self._used[slot] + free, self._most[slot])

    def _is_gone(self, slot: int) -> bool:
        """Whether nobody holds the slot any more; what stood there is wiped."""
        if not self._lock(slot):
            return False
        self._since[slot] = self._used[slot] = self._allowed[slot] = 0
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
