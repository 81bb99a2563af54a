"""What vLLM's workers with NIXL need from outside on a few cores: cores of their own, and what spins put behind all others.

NixlConnector pins the main thread of each worker to the machine's last core, prefill's and decode's alike, whatever
VLLM_CPU_OMP_THREADS_BIND says. NIXL's progress thread polls without a pause, and takes half of the core where its worker
computes.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from bench.processes import CPU_FIELDS, TICK_S, Server

WORKER: Final = "VLLM::Worker"
WATCH_S: Final = 1.0
SPINS: Final = 0.1  # of a core, while there is no work
LAST: Final = 19  # nice value: 1.5 % of a core beside a thread that computes, and all of an idle one


def untangle(server: Server, cores: Collection[int]) -> list[int]:
    """Bind the workers of an idle server to `cores`, and make way for them. Returns: the threads put behind the others."""
    spinning = []
    for pid in server.processes()[WORKER]:
        for thread in _cpu_s(pid):
            os.sched_setaffinity(thread, cores)
        spinning += spinning_threads(pid)
    for thread in spinning:
        os.setpriority(os.PRIO_PROCESS, thread, LAST)
    return spinning


def spinning_threads(pid: int) -> list[int]:
    """Threads of `pid`, the main one apart, that use a core though the process has nothing to do."""
    before = _cpu_s(pid)
    time.sleep(WATCH_S)
    used = {thread: spent_s - before.get(thread, 0.0) for thread, spent_s in _cpu_s(pid).items()}
    return [thread for thread, spent_s in used.items() if thread != pid and spent_s > SPINS * WATCH_S]


def _cpu_s(pid: int) -> dict[int, float]:
    """Processor time of each thread."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    stats = {int(thread.name): (thread / "stat").read_text().rpartition(")")[2].split() for thread in threads}
    return {thread: sum(map(int, stat[CPU_FIELDS])) * TICK_S for thread, stat in stats.items()}
