"""How tests wait: long enough for a busy machine, and never for ever.

A limit is there for a hang only; nothing is said about speed by it. A test that took 5 s for enough failed where a process
needs 1 s to start and sixteen others want the same two cores.
"""

import asyncio
import time
from collections.abc import Callable
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


async def turns(count: int = 40) -> None:
    """Let everything that can go on go on, where nothing waits for time or for another process."""
    for _ in range(count):
        await asyncio.sleep(0)


def _check(ends_s: float, what: Callable[[], object] | str) -> None:
    assert time.monotonic() < ends_s, f"not within {PATIENCE_S:.0f} s: {what() if callable(what) else what}"
