"""The floor under the mesh: it answers what the mesh's clients ask, and leaves nothing behind."""

import asyncio
from pathlib import Path

from bench.closed_loop import Prompts, measure
from bench.floor import ROLES, floor
from bench.peers.arguments import model_directory
from bench.processes import free_port, model_name
from tests.waiting import PATIENCE_S


def test_the_floor_streams_what_was_asked_for_from_four_processes() -> None:
    port = free_port()
    with floor(model_directory("smollm2-135m"), port, step_s=0.0) as pids:
        run = asyncio.run(measure(port, Prompts(model_name(port, PATIENCE_S), 20, 8), pids, concurrency=2, seconds=0.5))
        assert set(pids) == {"nats-server", *(role.__name__ for role in ROLES)}
    assert (run.failed, run.last_words) == (0, "")
    assert len(run.ttft_s) >= 2
    assert all(run.cpu_s[role.__name__] >= 0 for role in ROLES)
    assert not any(Path(f"/proc/{pid}").exists() for several in pids.values() for pid in several)
