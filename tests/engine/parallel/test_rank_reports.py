"""The leader reads its followers' reports among other output, and ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.parallel import rank_processes
from engine.parallel.orders import Report
from engine.parallel.rank_processes import RankProcesses
from tests.engine.parallel.printing_follower import TORN
from tests.waiting import PATIENCE_S

END_S = 1.0
Start = Callable[..., RankProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    memory = os.memfd_create("reports")
    started: list[RankProcesses] = []

    def start(model: str, ranks: int = 2) -> RankProcesses:
        config = EngineConfig(tensor_parallel=ranks)
        module = "tests.engine.parallel.printing_follower"
        started.append(RankProcesses(model, config, tmp_path, module, memory=memory))
        return started[-1]

    yield start
    for processes in started:
        processes.close()
    os.close(memory)


def next_report(processes: RankProcesses) -> Report:
    (follower,) = processes._all
    return follower.reports.get(timeout=PATIENCE_S)


def test_text_that_a_library_prints_is_no_report(start: Start) -> None:
    """The thread that reads reports ended, and the leader waited forever."""
    processes = start("m")
    report = next_report(processes)
    assert (report.device, report.failure) == ("cpu", "")
    assert processes.lost is None


def test_a_follower_that_ends_in_the_midst_of_a_report_is_lost(start: Start) -> None:
    processes = start(TORN)
    assert next_report(processes).failure == "it ended with 3"
    assert processes.is_over.wait(PATIENCE_S)
    assert processes.lost is not None


def test_a_rank_that_is_started_by_hand_reports_what_starts_ranks() -> None:
    """It ended with a traceback, or waited for an order at a terminal."""
    ended = subprocess.run(
        [sys.executable, "-m", "services.rank", "--help"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("a worker with MESH_ENGINE__TENSOR_PARALLEL (--tp) starts its ranks itself")


def test_followers_that_do_not_end_are_killed_at_the_same_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had its own time limit in turn: eight outlasted the grace period of a pod."""
    monkeypatch.setattr(rank_processes, "END_S", END_S)
    processes = start("m", ranks=8)
    processes.reports()
    for follower in processes._all:
        os.kill(follower.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    processes.close()
    assert END_S < time.monotonic() - started < 6 * END_S
    assert {follower.process.returncode for follower in processes._all} == {-signal.SIGKILL}
