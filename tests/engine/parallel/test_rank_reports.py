"""The leader reads its followers' reports, whatever else they print."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.parallel.orders import Report
from engine.parallel.rank_processes import RankProcesses
from tests.engine.parallel.printing_follower import TORN

SOON_S = 20.0
Start = Callable[[str], RankProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    memory = os.memfd_create("reports")
    started: list[RankProcesses] = []

    def start(model: str) -> RankProcesses:
        config = EngineConfig(tensor_parallel=2)
        module = "tests.engine.parallel.printing_follower"
        started.append(RankProcesses(model, config, tmp_path, module, memory=memory))
        return started[-1]

    yield start
    for processes in started:
        processes.close()
    os.close(memory)


def next_report(processes: RankProcesses) -> Report:
    (follower,) = processes._all
    return follower.reports.get(timeout=SOON_S)


def test_text_that_a_library_prints_is_no_report(start: Start) -> None:
    """The thread that reads reports ended, and the leader waited for ever."""
    processes = start("m")
    report = next_report(processes)
    assert (report.device, report.failure) == ("cpu", "")
    assert processes.lost is None


def test_a_follower_that_ends_in_the_midst_of_a_report_is_lost(start: Start) -> None:
    processes = start(TORN)
    assert next_report(processes).failure == "it ended with 3"
    assert processes.is_over.wait(SOON_S)
    assert processes.lost is not None
