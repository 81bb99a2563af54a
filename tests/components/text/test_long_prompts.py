"""Long prompts are encoded in threads: few at a time, short ones first, and none of cancelled requests."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from components.errors import QueueFull
from components.text import encoder as module
from components.text.encoder import LongPrompts
from tests.waiting import PATIENCE_S, until


class Gate:
    """Work that records its order, and waits for the test."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.open = threading.Event()
        self.threads: set[str] = set()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.order.append(name)
            self.threads.add(threading.current_thread().name)
            assert self.open.wait(PATIENCE_S)
            return name

        return run


async def started(gate: Gate, number: int) -> None:
    await until(lambda: len(gate.order) >= number)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_shorter_prompts_overtake_those_that_came_just_before() -> None:
    async def run() -> Gate:
        gate, turns = Gate(), LongPrompts(1)
        tasks = [asyncio.create_task(turns.run(1000, gate.work("first")))]
        await started(gate, 1)
        for name, chars in (("longest", 400_000), ("long", 200_000), ("short", 10_000)):
            tasks.append(asyncio.create_task(turns.run(chars, gate.work(name))))
            await settle()
        gate.open.set()
        assert await asyncio.gather(*tasks) == ["first", "longest", "long", "short"]
        return gate

    gate = asyncio.run(run())
    assert gate.order == ["first", "short", "long", "longest"]
    assert len(gate.threads) == 1


def test_a_long_prompt_waits_for_no_short_one_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OVERTAKEN_S_PER_CHAR", 1e-7)

    async def run() -> list[str]:
        gate, turns = Gate(), LongPrompts(1)
        tasks = [asyncio.create_task(turns.run(1000, gate.work("first")))]
        await started(gate, 1)
        tasks.append(asyncio.create_task(turns.run(200_000, gate.work("long"))))  # its turn is 20 ms from now
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(turns.run(10_000, gate.work("late"))))
        await settle()
        gate.open.set()
        await asyncio.gather(*tasks)
        return gate.order

    assert asyncio.run(run()) == ["first", "long", "late"]


def test_a_caller_that_leaves_gets_no_work_and_passes_its_turn_on() -> None:
    async def run() -> list[str]:
        gate, turns = Gate(), LongPrompts(1)
        tasks = {"first": asyncio.create_task(turns.run(1, gate.work("first")))}
        await started(gate, 1)
        for name in ("gone", "next"):
            tasks[name] = asyncio.create_task(turns.run(1, gate.work(name)))
            await settle()
        tasks["gone"].cancel()
        gate.open.set()
        assert await asyncio.wait_for(tasks["next"], PATIENCE_S) == "next"
        assert await turns.run(1, lambda: "again") == "again"
        assert tasks["gone"].cancelled()
        return gate.order

    assert asyncio.run(run()) == ["first", "next"]


def test_a_turn_given_to_a_caller_that_has_just_left_is_passed_on() -> None:
    async def run() -> None:
        turns = LongPrompts(1)
        gate = Gate()
        first = asyncio.create_task(turns.run(1, gate.work("first")))
        await started(gate, 1)
        gone = asyncio.create_task(turns.run(1, gate.work("gone")))
        await settle()
        first.cancel()  # passes its turn on to the one that leaves in the same turn of the loop
        await asyncio.sleep(0)
        gone.cancel()
        gate.open.set()
        await asyncio.wait({first, gone})
        assert await asyncio.wait_for(turns.run(1, lambda: "free"), PATIENCE_S) == "free"

    asyncio.run(run())


def test_what_the_work_raises_is_raised_and_frees_the_turn() -> None:
    async def run() -> None:
        turns = LongPrompts(1)
        with pytest.raises(ZeroDivisionError):
            await turns.run(1, lambda: 1 // 0)
        assert await turns.run(1, lambda: 2) == 2

    asyncio.run(run())


def test_the_event_loop_runs_meanwhile() -> None:
    async def run() -> None:
        gate = Gate()
        task = asyncio.create_task(LongPrompts(1).run(1, gate.work("long")))
        await started(gate, 1)
        assert not task.done()
        gate.open.set()
        assert await task == "long"

    asyncio.run(run())


def test_what_is_too_much_to_wait_is_refused_with_when_to_come_again() -> None:
    async def run() -> None:
        gate, turns = Gate(), LongPrompts(1, max_waiting_chars=1000)
        tasks = [asyncio.create_task(turns.run(5000, gate.work("first")))]
        await started(gate, 1)
        tasks.append(asyncio.create_task(turns.run(4000, gate.work("alone"))))  # larger than all that may wait
        await settle()
        with pytest.raises(QueueFull) as refused:
            await turns.run(1, gate.work("more"))
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s > 1
        tasks[1].cancel()
        await settle()
        tasks[1] = asyncio.create_task(turns.run(600, gate.work("second")))
        await settle()
        with pytest.raises(QueueFull):
            await turns.run(401, gate.work("more"))
        tasks.append(asyncio.create_task(turns.run(400, gate.work("third"))))
        await settle()
        gate.open.set()
        assert await asyncio.gather(*tasks) == ["first", "second", "third"]
        assert turns._chars == 0

    asyncio.run(run())
