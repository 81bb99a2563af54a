"""Render and tokenise long prompts in threads."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from typing import Final, TypeVar

from components.errors import QueueFull

T = TypeVar("T")

MAX_THREADS: Final = 4
S_PER_CHAR: Final = 2.5e-7  # of `tokenizers`
OVERTAKEN_S_PER_CHAR: Final = 20 * S_PER_CHAR  # 1 s for 200,000 characters
MAX_WAITING_CHARS: Final = 32 << 20  # about eight million tokens


class LongPrompts:
    """Shorter prompts overtake a longer one only if they arrive soon after it: no prompt starves.

    It belongs to the event loop.
    """

    def __init__(self, threads: int | None = None, max_waiting_chars: int = MAX_WAITING_CHARS) -> None:
        """`threads` None: half of this process's cores, at most `MAX_THREADS`."""
        self._free = threads or max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._executor = ThreadPoolExecutor(self._free, "tokenize")
        self._threads = self._free
        self._max_chars = max_waiting_chars
        self._chars = 0  # waiting
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def run(self, chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a prompt of `chars` characters. Raises: QueueFull."""
        await self._turn(chars)
        loop = asyncio.get_running_loop()
        job = self._executor.submit(work)
        job.add_done_callback(lambda _: _tell(loop, self._pass_on))  # the thread is busy until then
        return await asyncio.wrap_future(job)

    async def _turn(self, chars: int) -> None:
        if self._free:
            self._free -= 1
            return
        if self._chars and self._chars + chars > self._max_chars:
            raise QueueFull(
                "too much waits to be tokenised",
                retry_after_s=1 + self._chars * S_PER_CHAR / self._threads,
                waiting_chars=self._chars,
            )
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (time.monotonic() + chars * OVERTAKEN_S_PER_CHAR, next(self._numbers), turn))
        self._chars += chars
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came, so another prompt may have it
                self._pass_on()
            raise
        finally:
            self._chars -= chars

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
