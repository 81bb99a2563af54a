"""The thread that polls a transfer library."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time

import pytest

from components.errors import TransferFailed
from components.kv_transfer.own_thread import OwnThread
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


def _nothing() -> None:
    return


async def test_a_thread_that_loses_the_processor_continues_to_poll() -> None:
    """A timed `get` of CPython's SimpleQueue waited forever if its thread was preempted as the wait began.

    On a busy machine a transfer then hung until the next one, or its deadline.
    """
    polls = 0

    def poll() -> float:
        nonlocal polls
        polls += 1
        if polls % 2:
            thread.wake()  # half of the waits then begin with a free lock, as the bug needs
        return 1e-7

    thread = OwnThread("polls", poll)
    thread.start()
    native_id = thread._thread.native_id
    assert native_id is not None
    core = {min(os.sched_getaffinity(0))}  # tests on other cores are not disturbed
    os.sched_setaffinity(native_id, core)
    thread.post(_nothing)
    fights = "import os\nwhile True: os.sched_yield()"  # switches more often than a plain loop
    busy = [subprocess.Popen([sys.executable, "-c", fights]) for _ in range(2)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, core)
        ends_s = time.monotonic() + 3.0
        while time.monotonic() < ends_s:
            before = polls
            await asyncio.sleep(0.1)
            # the thread waited for work forever, although it had something to poll
            await until(lambda: polls > before + 1)  # noqa: B023
    finally:
        for process in busy:
            process.kill()
            process.wait()
        await thread.stop()


async def test_the_loop_and_the_thread_never_use_the_library_at_once() -> None:
    users: set[int] = set()
    met = 0
    done = {"loop": 0, "thread": 0}

    def use() -> None:
        nonlocal met
        users.add(threading.get_ident())
        time.sleep(1e-4)  # lets the other thread run
        met += len(users) > 1
        users.discard(threading.get_ident())

    def work() -> bool:
        done["loop" if threading.get_ident() == loop_thread else "thread"] += 1
        use()
        return False

    loop_thread = threading.get_ident()
    thread = OwnThread("shared", use)
    thread.start()
    try:
        for _ in range(2000):
            thread.wake()
            time.sleep(random.random() * 2e-3)  # before or after it ends
            thread.post_short(work)
            if min(done.values()) >= 20:
                break
        await thread.ask(_nothing)
    finally:
        await thread.stop()
    assert not met
    assert done["loop"] >= 20, "the library is lent to the loop"
    assert done["thread"] >= 20, "what comes while the thread is at it is left to the thread"


async def test_short_work_does_not_wait_and_its_writes_are_polled() -> None:
    done: list[int] = []
    begun, busy, polled = threading.Event(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def poll() -> None:
        if done:
            loop.call_soon_threadsafe(polled.set)

    def work() -> bool:
        done.append(threading.get_ident())
        return True

    def be_busy() -> None:
        begun.set()
        busy.wait()

    thread = OwnThread("short", poll)
    thread.start()
    try:
        thread.post_short(work)
        assert done == [threading.get_ident()]
        await asyncio.wait_for(polled.wait(), PATIENCE_S)
        thread.post(be_busy)
        await until(begun.is_set)
        thread.post_short(work)
        assert len(done) == 1, "it would have to wait"
        busy.set()
        await thread.ask(_nothing)
        assert done[1:] == [thread._thread.ident]
    finally:
        busy.set()
        await thread.stop()


async def test_a_future_is_settled_at_once_on_the_loop_and_by_the_loop_from_the_thread() -> None:
    thread = OwnThread("settles", lambda: None)
    thread.start()
    try:
        ours: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        thread.settle(ours, 1)
        assert ours.result() == 1
        theirs: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        settled_by: list[int] = []
        theirs.add_done_callback(lambda _: settled_by.append(threading.get_ident()))
        thread.post(lambda: thread.settle(theirs, 2))
        assert await asyncio.wait_for(theirs, PATIENCE_S) == 2
        assert settled_by == [threading.get_ident()]
    finally:
        await thread.stop()


async def test_after_its_end_nothing_is_done_any_more_and_what_was_handed_over_before_is() -> None:
    """After `stop`, a short write used the library, and callers with other work waited forever."""
    done: list[str] = []
    busy = threading.Event()
    thread = OwnThread("ends", lambda: None)
    thread.start()
    thread.post(busy.wait)
    before = asyncio.create_task(thread.ask(lambda: done.append("before")))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)

    def late() -> bool:
        done.append("late")
        return False

    async def assert_refused() -> None:
        for post in (thread.post_short, thread.post):
            with pytest.raises(TransferFailed, match="ends"):
                post(late)
        with pytest.raises(TransferFailed, match="ends"):
            await asyncio.wait_for(thread.ask(late), PATIENCE_S)

    try:
        await assert_refused()  # while it ends
    finally:
        busy.set()
    await stopping
    await before
    await assert_refused()
    assert done == ["before"]
