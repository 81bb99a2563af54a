"""The longest time for which an event loop gets no turn."""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from components.process import GIL_SWITCH_S

MAX_GAP_S: Final = 0.2  # for a busy machine; usual gaps are 10 to 50 ms


@asynccontextmanager
async def longest_gap() -> AsyncIterator[list[float]]:
    """Yield the longest time in seconds between two turns of a task that sleeps a millisecond; filled at the end.

    Threads switch as in services, and garbage collection skips earlier objects, such as tests' modules. Only processor time
    of this process counts, as a busy machine causes other gaps.
    """
    longest = [0.0]

    async def watch() -> None:
        last, used_s = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now, now_used_s = time.perf_counter(), time.process_time()
            longest[0] = max(longest[0], min(now - last, now_used_s - used_s))
            last, used_s = now, now_used_s

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(GIL_SWITCH_S)
    gc.freeze()
    task = asyncio.create_task(watch())
    await asyncio.sleep(0)  # it starts
    try:
        yield longest
        await asyncio.sleep(0.01)
    finally:
        task.cancel()
        gc.unfreeze()
        sys.setswitchinterval(switch_s)
