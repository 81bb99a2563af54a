"""How tests wait: long enough for a busy machine, and never forever.

A limit catches a hang, and says nothing about speed. A test once gave a process 5 s to start, which takes 1 s. It failed on
two cores with sixteen other processes.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 100.0


async def until(condition: Callable[[], object], what: Callable[[], object] | str = "the condition") -> None:
    """Return when `condition()` is true; fail with `what` when it never is."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        _check(ends_s, what)
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], what: Callable[[], object] | str = "the condition") -> None:
    """The same for tests without an event loop."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        _check(ends_s, what)
        time.sleep(0.02)  # what it waits for is mostly another process


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until no thread of the process runs: on another core one may finish an answer first."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(" T " in stat.read_text().rpartition(")")[2][:3] for stat in _threads(pid)))


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def turns(count: int = 40) -> None:
    """Give all tasks turns of the loop, in a test where none waits for time or for another process."""
    for _ in range(count):
        await asyncio.sleep(0)


def _threads(pid: int) -> Iterator[Path]:
    return Path(f"/proc/{pid}/task").glob("*/stat")


def _check(ends_s: float, what: Callable[[], object] | str) -> None:
    assert time.monotonic() < ends_s, f"not within {PATIENCE_S:.0f} s: {what() if callable(what) else what}"
