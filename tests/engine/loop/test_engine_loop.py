import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.errors import InvariantBroken, PromptTooLong
from engine.errors import ModelUnavailable
from engine.model.load import LoadedModel
from engine.ports import Engine, EngineRequest, Phase, StepOutput
from engine.start import run_engine, start_engine
from tests.engine.loops import FailingEngine, Listener, failing, processor_s, running
from tests.engine.mock_engine import HeldDevice, make_mock
from tests.engine.tiny_engine import alone, greedy, make_engine, peek, prompt, small
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("pipeline")


@pytest.fixture(params=[True, False], ids=["threaded", "inline"])
def thread(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_an_engine_starts_from_a_directory_and_answers(
    tiny_dir: Path, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.progress.QUICK_S", 0.0)

    async def main() -> None:
        told: list[tuple[str, int, int]] = []
        async with start_engine(str(tiny_dir), small(), Path("unused"), lambda *args: told.append(args)) as loop:
            assert loop.stats.total_pages == loop.stats.free_pages == 64
            assert loop.engine.max_context == 512
            assert peek(loop.engine, prompt(40)) == 0
            assert await Listener(loop).ask(loop, "r", prompt(20), greedy(9)) == alone(tiny, prompt(20), greedy(9))
        assert told[0][0] == "Loading weights"
        assert told[-1][1] == told[-1][2]

    asyncio.run(main())


def test_many_requests_at_once_get_their_own_tokens_on_the_loops_thread(thread: bool, tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny, thread=thread) as loop:
            listener = Listener(loop)
            asked = [listener.ask(loop, f"r{i}", prompt(10 + i, start=i), greedy(12)) for i in range(8)]
            answers = await asyncio.gather(*asked)
            assert answers == [alone(tiny, prompt(10 + i, start=i), greedy(12)) for i in range(8)]
            assert listener.threads == {threading.get_ident()}
            await asyncio.sleep(0)
            assert loop.stats == listener.outputs[-1].stats

    asyncio.run(main())


def test_what_a_call_returns_and_raises_reaches_its_caller(thread: bool, tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny, thread=thread) as loop:
            assert await loop.between_steps(lambda engine: (engine.max_context, threading.current_thread().name)) == (
                512,
                "engine" if thread else threading.current_thread().name,
            )
            with pytest.raises(PromptTooLong):
                await loop.between_steps(lambda engine: engine.submit(EngineRequest("r", prompt(600), greedy(1))))
            assert await Listener(loop).ask(loop, "next", prompt(5), greedy(3)), "the thread lives on"

    asyncio.run(main())


def test_an_idle_engine_sleeps_and_wakes_at_once(thread: bool, tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny, thread=thread) as loop:
            listener = Listener(loop)
            await listener.ask(loop, "warm", prompt(5), greedy(3))
            await asyncio.sleep(0.05)
            slept = []
            for _ in range(2):  # the last step may end late, and its output is no sign of life
                before, used_s = len(listener.outputs), processor_s()
                await asyncio.sleep(0.5)
                slept.append((len(listener.outputs) - before, processor_s() - used_s))
                if slept[-1][0] == 0:
                    break
            assert slept[-1][0] == 0, f"outputs and seconds of processor time while idle: {slept}"
            assert slept[-1][1] < 0.2
            took_s = []
            for _ in range(3):  # the best of them: a busy machine spoils one now and then
                asked = time.perf_counter()
                await asyncio.wait_for(loop.between_steps(lambda engine: None), PATIENCE_S)
                took_s.append(time.perf_counter() - asked)
            assert min(took_s) < 0.2

    asyncio.run(main())


def test_requests_that_wait_for_held_pages_keep_the_step_counter_moving(thread: bool, tiny: LoadedModel) -> None:
    """Waiting requests with a step counter that stands still count as a hung engine."""

    async def main() -> None:
        async with running(tiny, thread=thread, num_pages=4) as loop:
            await loop.between_steps(
                lambda engine: engine.submit(EngineRequest("d", prompt(60), greedy(3), Phase.DECODE))
            )
            await until(lambda: loop.stats.num_reserved)
            await loop.between_steps(lambda engine: engine.cancel("d"))
            listener = Listener(loop)
            asked = asyncio.create_task(listener.ask(loop, "r", prompt(20), greedy(3)))
            await until(lambda: (loop.stats.num_waiting, loop.stats.num_held) == (1, 1))
            before, began = loop.stats.step, time.monotonic()
            await until(lambda: loop.stats.step >= before + 2)
            passed_s = time.monotonic() - began
            assert loop.stats.step < before + 10 * max(1.0, passed_s / 0.5), "a few steps a second"
            await loop.between_steps(lambda engine: engine.release("d"))
            assert await asked

    asyncio.run(main())


def test_what_deliver_returns_is_not_overtaken_by_the_next_step(thread: bool, tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny, thread=thread) as loop:
            told: list[str] = []
            reserved = asyncio.Event()

            def take(output: StepOutput) -> None:
                told.extend(tokens.request_id for tokens in output.tokens)
                if output.reserved:
                    reserved.set()

            loop.on_output(take)
            request = EngineRequest("r", prompt(5), greedy(4, ignore_eos=True), Phase.DECODE)
            await loop.between_steps(lambda engine: engine.submit(request))
            await reserved.wait()
            delivered = loop.between_steps(lambda engine: engine.deliver("r", 7))
            time.sleep(0.1)  # the engine steps meanwhile
            told.append(f"first token {(await delivered)[0].token_ids}")
            await until(lambda: len(told) >= 4)
            assert told == ["first token [7]", "r", "r", "r"]

    asyncio.run(main())


def test_pages_and_answers_are_had_while_a_device_computes(
    thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HeldDevice(monkeypatch)

    async def main() -> None:
        slow = {"speedup": 1.0, "step_s": 0.2}
        async with run_engine(lambda: make_mock(tmp_path, mock=slow), thread=thread) as loop:
            told: list[str] = []
            reserved = asyncio.Event()

            def take(output: StepOutput) -> None:
                told.extend(tokens.request_id for tokens in output.tokens)
                told.extend(one.request_id for one in output.reserved)
                if output.reserved:
                    assert output.stats.step_s == 0.0
                    reserved.set()

            loop.on_output(take)
            await loop.between_steps(lambda engine: engine.submit(EngineRequest("computes", prompt(5), greedy(1))))
            await until(lambda: device.is_busy)
            request = EngineRequest("waits", prompt(5), greedy(4), Phase.DECODE)
            await loop.between_steps(lambda engine: engine.submit(request))
            await reserved.wait()
            assert await loop.between_steps(lambda engine: engine.deliver("waits", 7))
            assert told == ["waits"]
            await loop.between_steps(lambda engine: engine.cancel("waits"))
            device.finish()
            await until(lambda: "computes" in told)

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["stopped", "lost"])
def test_an_engine_that_ends_in_its_last_step_does_not_sleep_on(
    thread: bool, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the device computed, the engine's thread mistook the wake-up for a call, and slept after the step."""
    device = HeldDevice(monkeypatch)
    lose: list[Callable[[Exception], None]] = []

    def build() -> Engine:
        engine = make_mock(tmp_path, mock={"speedup": 1.0, "step_s": 0.2})
        monkeypatch.setattr(engine, "on_loss", lose.append)
        return engine

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), run_engine(build, thread=thread) as loop:
            await loop.between_steps(lambda engine: engine.submit(EngineRequest("r", prompt(5), greedy(1))))
            await until(lambda: device.is_busy)
            asyncio.get_running_loop().call_later(0.1, device.finish)
            if ends == "lost":
                lose[0](OSError("rank 1 has ended"))
                assert isinstance(await loop.failed(), OSError)

    asyncio.run(main())


def test_a_dead_engine_does_not_look_alive(thread: bool, tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    def kill(engine: Engine) -> str:
        FailingEngine.fatal = True
        return "done"

    async def main() -> None:
        async with run_engine(lambda: failing(make_engine(tiny)), thread=thread) as loop:
            watcher = asyncio.create_task(loop.failed())
            assert await loop.between_steps(kill) == "done"
            assert isinstance(await watcher, OSError)
            with pytest.raises(InvariantBroken, match="the device is gone"):
                await loop.between_steps(lambda engine: None)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    FailingEngine.fatal = False
    assert "engine died" in caplog.text


def test_calls_in_the_queue_of_an_engine_that_stops_are_refused(thread: bool, tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny, thread=thread) as loop:
            pass
        with pytest.raises(InvariantBroken, match="stopped"):
            await loop.between_steps(lambda engine: None)
        assert not any(thread.name == "engine" for thread in threading.enumerate())

    asyncio.run(main())


def test_an_error_while_loading_is_raised_where_the_engine_is_started(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ModelUnavailable, match="no model 'nonsense'"):
            async with start_engine("nonsense", small(), tmp_path):
                pass

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_no_thread_and_no_open_engine_behind(
    thread: bool, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was built on the event loop after the cancellation kept its other processes."""
    go_on = threading.Event()
    closed: list[Engine] = []

    def slow() -> Engine:
        go_on.wait(PATIENCE_S)
        engine = make_engine(tiny)
        monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
        return engine

    async def main() -> None:
        starting = asyncio.create_task(run_engine(slow, thread=thread).__aenter__())
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        go_on.set()
        await until(lambda: not any(thread.name == "engine" for thread in threading.enumerate()))
        await until(lambda: len(closed) == 1)

    asyncio.run(main())
