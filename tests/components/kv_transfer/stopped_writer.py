"""A prefill that stops itself in the middle of a long write: `python -m tests.components.kv_transfer.stopped_writer`.

Reads the peer's endpoint as JSON. Prints the result of the write, and the number of its posted steps.
"""

import asyncio
import os
import signal
import sys
import time
from typing import Any, Final

import msgspec

from components.errors import MeshError
from components.kv_transfer.nixl_transfer import open_nixl
from components.wire.instances import KvEndpoint
from tests.components.kv_transfer.nixl_peer import LATER_MS, NUM_PAGES, Pages, say

FULL: Final = 7  # byte value of its pages
STEP_PAGES: Final = 8
STEPS_BEFORE: Final = 3  # posted before it stops
LIFE_S: Final = 0.5  # of the offer


async def main() -> None:
    pages = Pages()
    pages.set_all(FULL)
    async with open_nixl(pages, "prefill-stopped") as transfer:
        peer = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=KvEndpoint)
        await transfer.connect(peer)
        await transfer.write_pages(peer.agent, [0], [0], LATER_MS)  # sets the connection up
        transfer._short_pages = STEP_PAGES
        post, num_posted = transfer._agent.transfer, 0

        def stopping(handle: Any) -> Any:
            nonlocal num_posted
            state = post(handle)
            num_posted += 1
            if num_posted == STEPS_BEFORE:
                os.kill(os.getpid(), signal.SIGSTOP)
            return state

        transfer._agent.transfer = stopping
        while num_posted < STEPS_BEFORE:  # again, if a busy machine was too slow for the deadline
            num_posted, end = 0, "landed"
            try:
                deadline_ms = int((time.time() + LIFE_S) * 1000)
                await transfer.write_pages(peer.agent, range(NUM_PAGES), range(NUM_PAGES), deadline_ms)
            except MeshError as exc:
                end = type(exc).__name__
        say(f"{end} {num_posted}")


if __name__ == "__main__":
    asyncio.run(main())
