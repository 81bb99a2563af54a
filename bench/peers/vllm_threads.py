"""Give vLLM's NIXL workers cores of their own and lower the priority of spinning threads.

NixlConnector pins each worker's main thread to the machine's last core. NIXL's progress thread spins on the core of
its worker.
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
LAST: Final = 19  # nice value: 1.5 % of a core beside a computing thread


def untangle(server: Server, cores: Collection[int]) -> list[int]:
    """Bind an idle server's workers to `cores`. Returns: the threads with lowered priority."""
    spinning = []
    for pid in server.processes()[WORKER]:
        for thread in _cpu_s(pid):
            os.sched_setaffinity(thread, cores)
        spinning += spinning_threads(pid)
    for thread in spinning:
        os.setpriority(os.PRIO_PROCESS, thread, LAST)
    return spinning


def spinning_threads(pid: int) -> list[int]:
    """Threads of the idle process `pid`, except the main one, that use a core."""
    before = _cpu_s(pid)
    time.sleep(WATCH_S)
    used = {thread: spent_s - before.get(thread, 0.0) for thread, spent_s in _cpu_s(pid).items()}
    return [thread for thread, spent_s in used.items() if thread != pid and spent_s > SPINS * WATCH_S]


def _cpu_s(pid: int) -> dict[int, float]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    stats = {int(thread.name): (thread / "stat").read_text().rpartition(")")[2].split() for thread in threads}
    return {thread: sum(map(int, stat[CPU_FIELDS])) * TICK_S for thread, stat in stats.items()}
