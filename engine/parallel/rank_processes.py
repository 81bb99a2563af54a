"""The leader's side of its followers' processes."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Final

import msgspec

from components.startup import CannotServe, WrongSettings
from components.wire.layout import RankMemory
from engine.config import EngineConfig
from engine.parallel.orders import Report, Start, transfer_socket_of

log = logging.getLogger(__name__)

END_S: Final = 10.0  # timeout for followers to end before they are killed


class RankLost(CannotServe):
    """A process of the instance has ended, or the ranks no longer agree."""


class Follower:
    """One follower's process. A thread reads its reports."""

    def __init__(self, rank: int, start: Start, module: str, lose: Callable[[str], None]) -> None:
        self.rank = rank
        self.reports: Queue[Report] = Queue()
        inherited = (start.memory, *start.wakers, *([] if start.staging is None else [start.staging]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=inherited
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, and its last report has the reason
            self.process.stdin.write(start.dump().encode() + b"\n")
            self.process.stdin.flush()
        threading.Thread(target=self._read, args=(lose,), name=f"follower {rank}", daemon=True).start()

    def _read(self, lose: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        last = Report(self.process.pid)
        with self.process.stdout as lines:
            for line in lines:
                try:
                    last = msgspec.json.decode(line, type=Report)
                except msgspec.DecodeError:  # a library printed the line, or the process was killed while it wrote
                    log.warning(
                        "unexpected output of a follower",
                        extra={"rank": self.rank, "text": line.decode(errors="replace").strip()},
                    )
                    continue
                self.reports.put(last)
        why = last.failure or f"it ended with {self.process.wait()}"
        if not last.failure:
            self.reports.put(Report(self.process.pid, failure=why))
        lose(f"rank {self.rank}, process {self.process.pid}: {why}")

    def end(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # closing flushes data that could not be sent
            self.process.stdin.close()

    def wait(self, until_s: float) -> None:
        """Kill the process if it is alive at `until_s`, a monotonic time."""
        try:
            self.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning(
                "a follower did not end in time, killing it", extra={"rank": self.rank, "follower": self.process.pid}
            )
            self.process.kill()
            self.process.wait()


class RankProcesses:
    """The followers of this process.

    Args:
        memory: descriptor of shared memory, which followers inherit, like `wakers` and `staging`.
        on_loss: called on another thread, before other callbacks, when a follower has ended.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        state_dir: Path,
        module: str,
        *,
        memory: int,
        wakers: Sequence[int] = (),
        staging: int | None = None,
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        # Private. Followers remove it; if they were killed as well, services.local does, by our process id in the name.
        self.directory = Path(tempfile.mkdtemp(prefix=f"kvmesh-ranks-{os.getpid()}-"))
        self.store = self.directory / "store"
        self.is_over = threading.Event()  # set when a follower is lost or `close` was called
        self.lost: RankLost | None = None
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Exception], None]] = []
        self._closing = False

        def start(rank: int) -> Follower:
            order = Start(model, str(state_dir), config, rank, str(self.store), memory, list(wakers), staging)
            return Follower(rank, order, module, self._lose)

        self._all = [start(rank) for rank in range(1, config.tensor_parallel)]

    def reports(self) -> list[Report]:
        """Wait for the next report of each follower. Raises: WrongSettings, RankLost."""
        reports = [follower.reports.get() for follower in self._all]
        for follower, report in zip(self._all, reports, strict=True):
            if report.failure:
                kind = WrongSettings if report.is_setting else RankLost
                raise kind(report.failure if report.is_setting else f"rank {follower.rank}: {report.failure}")
        return reports

    def rank_memories(self) -> list[RankMemory]:
        """Wait for each follower's pages. Raises: WrongSettings, RankLost."""
        return [
            RankMemory(made.pid, made.device, made.address, str(transfer_socket_of(self.directory, rank)))
            for rank, made in enumerate(self.reports(), 1)
        ]

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback`, on any thread, when a follower is lost."""
        with self._lock:
            self._callbacks.append(callback)
            lost = self.lost
        if lost is not None:
            callback(lost)

    def close(self) -> bool:
        """End the processes. Return False if an earlier call has done so."""
        with self._lock:
            if self._closing:
                return False
            self._closing = True
        self.is_over.set()
        for follower in self._all:
            follower.end()
        until_s = time.monotonic() + END_S  # one limit for all, because a supervisor may soon kill this process
        for follower in self._all:
            follower.wait(until_s)
        shutil.rmtree(self.directory, ignore_errors=True)
        return True

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._closing or self.lost is not None:
                return
            self.lost = lost = RankLost(f"this instance has lost {why}")
            callbacks = list(self._callbacks)
        self.is_over.set()
        if self._on_loss is not None:
            self._on_loss()
        for callback in callbacks:
            callback(lost)
