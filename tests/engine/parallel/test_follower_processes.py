"""A lost follower ends its engine at once; a lost leader leaves no follower.

The follower of a killed leader is started like users'. Elsewhere followers are forks.
"""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from components.startup import WrongSettings
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.parallel.rank_processes import RankLost, RankProcesses
from engine.ports import EngineRequest
from engine.start import run_engine
from tests.engine.parallel.led import FORKING, HOME
from tests.engine.tiny_engine import greedy, prompt, small
from tests.waiting import PATIENCE_S, is_alive, until


def build_forked(model: Path, config: EngineConfig) -> EngineCore:
    with FORKING.in_use():
        return build_engine(str(model), config, HOME)


@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "in a step"])
def test_an_engine_that_loses_a_follower_ends_and_names_it(tiny_dir: Path, busy: bool, kernel: str | None) -> None:
    async def main() -> None:
        config = small(tensor_parallel=2)
        async with run_engine(lambda: build_forked(tiny_dir, config)) as loop:
            (follower,) = [rank.pid for rank in loop.engine.kv_region.followers]
            if busy:
                request = EngineRequest("r", prompt(9), greedy(10_000, ignore_eos=True))
                await loop.between_steps(lambda engine: engine.submit(request))
                await until(lambda: loop.stats.num_running == 1)
            os.kill(follower, signal.SIGKILL)
            error = await asyncio.wait_for(loop.failed(), PATIENCE_S)
        assert isinstance(error, RankLost)
        assert error.message.startswith(f"this instance has lost rank 1, process {follower}: it ended with -9")
        assert not is_alive(follower)

    asyncio.run(main())


def test_followers_that_ended_before_their_orders_were_sent_are_closed_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the pipe flushed the unsent orders again, and `close` failed there."""

    class EndedAtOnce(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", EndedAtOnce)
    processes = RankProcesses(
        "mock", small(tensor_parallel=3), tmp_path, "tests.engine.parallel.no_such_module", memory=0
    )
    with pytest.raises(RankLost, match="rank 1: it ended with 1"):
        processes.reports()
    assert processes.close()
    assert not processes.directory.exists()


def test_an_engine_that_is_stopped_ends_its_followers(tiny_dir: Path, kernel: str | None) -> None:
    async def main() -> None:
        async with run_engine(lambda: build_forked(tiny_dir, small(tensor_parallel=2))) as loop:
            (follower,) = [rank.pid for rank in loop.engine.kv_region.followers]
            os.kill(follower, signal.SIGTERM)  # like a signal to the process group: the leader decides
            os.kill(follower, signal.SIGINT)
            await loop.between_steps(lambda engine: engine.step())
            assert is_alive(follower)
        assert not is_alive(follower)

    asyncio.run(main())


def test_followers_do_not_outlive_a_leader_that_is_killed(tiny_dir: Path, kernel: str | None) -> None:
    async def main() -> None:
        pipe = subprocess.PIPE
        leader = FORKING.start(["tests.engine.parallel.sleeping_leader"], stdin=pipe, stdout=pipe, pass_fds=())
        with leader.stdin, leader.stdout:
            leader.stdin.write(f"{tiny_dir}\n".encode())
            leader.stdin.flush()
            [(follower, home)] = json.loads(leader.stdout.readline())
            assert is_alive(follower)
            assert Path(home).is_dir()
            assert f"-{leader.pid}-" in Path(home).name, "by this a supervisor finds it, if it kills all of them"
            leader.kill()
        leader.wait(PATIENCE_S)
        await until(lambda: not is_alive(follower))
        assert not Path(home).exists()

    asyncio.run(main())


def test_settings_that_the_ranks_cannot_use_are_refused(tiny_dir: Path) -> None:
    with pytest.raises(
        WrongSettings, match=r"tensor_parallel=3: .* has 4 query heads and 2 KV heads; it can be cut into 1, 2, 4"
    ):
        build_forked(tiny_dir, small(tensor_parallel=3))
    with pytest.raises(WrongSettings, match=r"engine\.kv_memory_gb"):
        build_forked(tiny_dir, small(tensor_parallel=2, num_pages=None, kv_memory_gb=1e-9))
