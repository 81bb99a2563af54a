"""The thread that polls a transfer library."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from components.kv_transfer.own_thread import OwnThread

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def _nothing() -> None:
    return


async def test_a_thread_that_loses_the_processor_goes_on_polling() -> None:
    """A timed `get` of CPython's SimpleQueue waited for ever when its thread was preempted as it began: a transfer of a busy
    machine hung until the next one came, or its deadline.
    """
    polls = 0

    def poll() -> float:
        nonlocal polls
        polls += 1
        if polls % 2:
            thread.post(_nothing)  # so that half of the waits begin with a lock that is free, as the fault needs
        return 1e-7

    thread = OwnThread("polls", poll)
    thread.start()
    thread.post(_nothing)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            before = polls
            await asyncio.sleep(0.2)
            assert polls > before + 1, "it waits for work, though it has something to poll"
    finally:
        for process in busy:
            process.kill()
            process.wait()
        await thread.stop()
