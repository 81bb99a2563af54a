"""How tests wait: long enough for a busy machine, but not forever.

A limit catches a hang; it does not test speed. A limit of 5 s for a start of 1 s failed beside sixteen other processes.
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
    """Wait until `condition()` is true; fail with `what` if it never is."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        _check(ends_s, what)
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], what: Callable[[], object] | str = "the condition") -> None:
    """Like `until`, without an event loop."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        _check(ends_s, what)
        time.sleep(0.02)  # mostly for another process


def freeze(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(" T " in stat.read_text().rpartition(")")[2][:3] for stat in _threads(pid)))


def is_alive(pid: int) -> bool:
    """False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def turns(count: int = 40) -> None:
    """Give all tasks turns of the event loop, if none waits for time or another process."""
    for _ in range(count):
        await asyncio.sleep(0)


def _threads(pid: int) -> Iterator[Path]:
    return Path(f"/proc/{pid}/task").glob("*/stat")


def _check(ends_s: float, what: Callable[[], object] | str) -> None:
    assert time.monotonic() < ends_s, f"not within {PATIENCE_S:.0f} s: {what() if callable(what) else what}"
