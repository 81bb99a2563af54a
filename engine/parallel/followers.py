"""The leader's side of the followers: it starts them, sends them orders, and notices when one ends."""

import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Final

import msgspec
import torch
from pydantic import TypeAdapter

from components.errors import InvariantBroken
from components.startup import WrongSettings
from engine.config import FOLLOWER, EngineConfig
from engine.parallel.orders import MakeModel, Order, Report, Start, encoder
from engine.parallel.step_line import LineBroken, StepLine
from engine.sharding.group import abort_group, join_group, leave_group

log = logging.getLogger(__name__)

END_S: Final = 10.0  # for a follower to end by itself
LOST_S: Final = 2.0  # for the end of a follower to become known, when a step has failed
DONE_LOOK_S: Final = 1e-4


class RankLost(InvariantBroken):
    """A process of the instance has ended, or the ranks no longer agree."""


class Follower:
    """One process. A thread reads its reports."""

    def __init__(self, rank: int, start: Start, module: str, lose: Callable[[str], None]) -> None:
        self.rank = rank
        self.reports: Queue[Report] = Queue()
        inherited = (start.memory, *start.wakers)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=inherited
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its reports say so
            self.process.stdin.write(start.dump().encode() + b"\n")
            self.process.stdin.flush()
        threading.Thread(target=self._read, args=(lose,), name=f"follower {rank}", daemon=True).start()

    def _read(self, lose: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        last = Report(self.process.pid)
        with self.process.stdout as lines:
            for line in lines:
                last = msgspec.json.decode(line, type=Report)
                self.reports.put(last)
        why = last.failure or f"it ended with {self.process.wait()}"
        if not last.failure:
            self.reports.put(Report(self.process.pid, failure=why))
        lose(f"rank {self.rank}, process {self.process.pid}: {why}")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning(
                "a follower did not end, and is killed", extra={"rank": self.rank, "follower": self.process.pid}
            )
            self.process.kill()
            self.process.wait()


class Followers:
    """All followers of this process. Other methods than `on_loss` belong to the engine's thread."""

    def __init__(self, model: str, config: EngineConfig, state_dir: Path, module: str = FOLLOWER) -> None:
        self._size = config.tensor_parallel
        self.directory = Path(tempfile.mkdtemp(prefix="kvmesh-ranks-"))  # private; followers remove it
        self._store = self.directory / "store"
        self._line = StepLine.make(self._size)
        self._is_over = threading.Event()  # a follower is lost, or `close` was called
        self._lock = threading.Lock()
        self._lost: RankLost | None = None
        self._callbacks: list[Callable[[Exception], None]] = []
        self._closing = False
        self._made = 0
        self._all = [self._started(rank, model, config, state_dir, module) for rank in range(1, self._size)]

    def _started(self, rank: int, model: str, config: EngineConfig, state_dir: Path, module: str) -> Follower:
        line = self._line
        start = Start(model, str(state_dir), config, rank, str(self._store), line.memory, line.wakers)
        return Follower(rank, start, module, self._lose)

    def join(self, device: torch.device) -> None:
        """Wait until all have loaded their part, then form the group.

        Raises: WrongSettings, RankLost.
        """
        self._reports()
        join_group(self._store, 0, self._size, device)

    def make_models(self, config: EngineConfig) -> int:
        """Let the followers allocate pages, while this rank does. Returns: the model's number."""
        self._made += 1
        self.send(MakeModel(self._made, TypeAdapter(EngineConfig).dump_json(config).decode()))
        return self._made

    def made(self) -> list[Report]:
        """Wait for the followers' pages. Raises: WrongSettings, RankLost."""
        return self._reports()

    def send(self, order: Order) -> None:
        """Raises: RankLost."""
        try:
            self._line.send(encoder.encode(order), self._is_over)
        except LineBroken as exc:
            raise self._lost or RankLost(str(exc)) from exc

    def wait_done(self) -> None:
        """Wait until the followers have done what was sent. Raises: RankLost."""
        while not self._line.is_done():
            if self._is_over.wait(DONE_LOOK_S):
                raise self._lost or RankLost("the followers have ended")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Guard a computation that all ranks do together. Raises: RankLost, for any failure."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except (RankLost, WrongSettings):
            raise
        except Exception as exc:
            self._is_over.wait(LOST_S)  # the lost rank is the cause, if there is one
            raise self._lost or RankLost(f"rank 0: {exc}") from exc

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            lost = self._lost
        if lost is not None:
            callback(lost)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._is_over.set()
        for follower in self._all:
            follower.end()
        for follower in self._all:
            follower.wait()
        leave_group()
        self._line.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _reports(self) -> list[Report]:
        reports = [follower.reports.get() for follower in self._all]
        for follower, report in zip(self._all, reports, strict=True):
            if report.failure:
                kind = WrongSettings if report.is_setting else RankLost
                raise kind(report.failure if report.is_setting else f"rank {follower.rank}: {report.failure}")
        return reports

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._closing or self._lost is not None:
                return
            self._lost = lost = RankLost(f"this instance has lost {why}")
            callbacks = list(self._callbacks)
        self._is_over.set()
        abort_group()
        for callback in callbacks:
            callback(lost)
