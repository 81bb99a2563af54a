import asyncio
import threading
import time
from pathlib import Path

import pytest

from components.errors import InvariantBroken
from engine.config import EngineConfig
from engine.loop.engine_loop import EngineLoop
from engine.loop.inline_loop import InlineLoop
from engine.loop.threaded_loop import ThreadedLoop
from engine.ports import EngineRequest, Phase, StepOutput
from engine.start import run_engine, start_engine
from tests.engine.loops import Listener
from tests.engine.mock_engine import HeldDevice, make_mock
from tests.engine.tiny_engine import greedy, prompt
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("pipeline")]


def recompute(loop: EngineLoop, request_id: str) -> None:
    loop.between_steps(lambda engine: engine.recompute(request_id), light=True)


def submit(loop: EngineLoop, request: EngineRequest) -> None:
    loop.between_steps(lambda engine: engine.submit(request), light=True)


async def test_a_mock_has_no_thread_unless_it_is_to_have_one(tmp_path: Path) -> None:
    for thread, kind in ((False, InlineLoop), (True, ThreadedLoop)):
        config = EngineConfig(num_pages=8, mock={"thread": thread})
        async with start_engine("mock", config, tmp_path) as loop:
            assert type(loop) is kind
            assert any(thread.name == "engine" for thread in threading.enumerate()) is thread


async def test_calls_run_at_once_while_a_device_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = HeldDevice(monkeypatch)
    async with run_engine(lambda: make_mock(tmp_path, mock={"speedup": 1.0, "step_s": 0.2}), thread=False) as loop:
        listener = Listener(loop)
        asked = asyncio.create_task(listener.ask(loop, "computes", prompt(5), greedy(1)))
        await until(lambda: device.is_busy)
        called = loop.between_steps(lambda engine: engine.has_work())
        assert called.done()
        assert await called
        request = EngineRequest("waits", prompt(5), greedy(4), Phase.DECODE)
        await loop.between_steps(lambda engine: engine.submit(request), light=True)
        await asyncio.sleep(0)
        assert [one.request_id for one in listener.outputs[-1].reserved] == ["waits"], "the pause was ended for it"
        assert not asked.done()
        assert loop.is_stepping
        device.finish()
        assert len(await asked) == 1
        await until(lambda: not loop.is_stepping)


async def test_the_event_loop_goes_on_between_two_steps(tmp_path: Path) -> None:
    async with run_engine(lambda: make_mock(tmp_path), thread=False) as loop:
        listener = Listener(loop)
        asked = asyncio.create_task(listener.ask(loop, "long", prompt(5), greedy(100, ignore_eos=True)))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 100, "each step has a turn of its own"


async def test_waiting_for_a_device_takes_no_processor_time(tmp_path: Path) -> None:
    async with run_engine(lambda: make_mock(tmp_path, mock={"speedup": 1.0, "step_s": 0.1}), thread=False) as loop:
        began = time.thread_time()
        await Listener(loop).ask(loop, "r", prompt(5), greedy(5, ignore_eos=True))
        assert time.thread_time() - began < 0.2


async def test_a_stop_waits_for_the_step_under_way_and_tells_what_it_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HeldDevice(monkeypatch)
    slow = {"speedup": 1.0, "step_s": 0.2}
    async with run_engine(lambda: make_mock(tmp_path, mock=slow, pipeline="off"), thread=False) as loop:
        listener = Listener(loop)
        submit(loop, EngineRequest("r", prompt(5), greedy(9, ignore_eos=True)))
        await until(lambda: device.is_busy)
        assert not listener.outputs
        asyncio.get_running_loop().call_later(0.1, device.finish)  # the stop has begun by then
    assert listener.tokens.keys() == {"r"}
    assert len(listener.outputs) == 1
    with pytest.raises(InvariantBroken, match="stopped"):
        await loop.between_steps(lambda engine: None)
    await asyncio.sleep(0.3)
    assert len(listener.outputs) == 1


async def test_what_a_callback_calls_is_heard_after_what_it_was_called_with(tmp_path: Path) -> None:
    """A callback may call the engine, also in a pause; steps are never nested."""
    outputs: list[tuple[str, int]] = []

    def take(output: StepOutput) -> None:
        for reserved in output.reserved:
            recompute(loop, reserved.request_id)
            outputs.append(("reserved", output.stats.step))
        outputs.extend(("token", output.stats.step) for _ in output.tokens)

    async with run_engine(lambda: make_mock(tmp_path, mock={"speedup": 1.0, "step_s": 0.02}), thread=False) as loop:
        loop.on_output(take)
        listener = Listener(loop)
        for i in range(4):
            listener.ended[f"d{i}"] = asyncio.Event()
            submit(loop, EngineRequest(f"d{i}", prompt(20, start=i), greedy(4, ignore_eos=True), Phase.DECODE))
            await asyncio.sleep(0.03)
        async with asyncio.timeout(PATIENCE_S):
            for ended in listener.ended.values():
                await ended.wait()
        assert all(len(tokens) == 4 for tokens in listener.tokens.values())
        assert [what for what, _ in outputs].count("reserved") == 4


async def test_a_preemption_does_not_stop_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in flight ends before a preemption, and is waited for like any other."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"the event loop would have slept for {seconds} s")

    monkeypatch.setattr("engine.mock.mock_runner.time.sleep", sleep)
    small = {"num_pages": 8, "reserve_tokens": 0}
    async with run_engine(
        lambda: make_mock(tmp_path, mock={"speedup": 1.0, "step_s": 0.01}, **small), thread=False
    ) as loop:
        listener = Listener(loop)
        asked = [listener.ask(loop, f"r{i}", prompt(17, start=i), greedy(40, ignore_eos=True)) for i in range(4)]
        assert [len(tokens) for tokens in await asyncio.gather(*asked)] == [40] * 4
        assert loop.stats.preemptions
