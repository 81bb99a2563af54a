import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import InvariantBroken, PromptTooLong
from components.startup import CannotServe, WrongSettings
from engine.core.engine_core import EngineCore
from engine.loop.engine_loop import EngineLoop
from engine.loop.threaded_loop import ThreadedLoop
from engine.model.load import LoadedModel
from engine.ports import Engine, EngineRequest, Phase
from engine.start import run_engine
from tests.engine.loops import FailingEngine, Listener, failing, running
from tests.engine.mock_engine import HeldDevice, make_mock
from tests.engine.tiny_engine import greedy, prompt
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("pipeline")


def test_a_call_runs_where_it_is_made_while_the_engine_rests(tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny) as loop:
            listener = Listener(loop)
            await rest(loop)
            here = threading.current_thread().name
            request = EngineRequest("r", prompt(5), greedy(4, ignore_eos=True), Phase.DECODE)

            def submit(engine: Engine) -> str:
                engine.submit(request)
                return threading.current_thread().name

            submitted = loop.between_steps(submit, light=True)
            assert submitted.done()
            assert await submitted == here
            assert not listener.outputs, "the caller goes on before anybody hears of the step that follows"
            await asyncio.sleep(0)
            assert [one.request_id for one in listener.outputs[-1].reserved] == ["r"], "and no thread was waited for"
            listener.ended["r"] = asyncio.Event()
            delivered = loop.between_steps(
                lambda engine: (engine.deliver("r", 7), threading.current_thread().name), light=True
            )
            assert delivered.done()
            [first], where = await delivered
            assert (first.token_ids, where) == ([7], here)
            await listener.ended["r"].wait()
            assert len(listener.tokens["r"]) == 3
            with pytest.raises(PromptTooLong):
                await loop.between_steps(
                    lambda engine: engine.submit(EngineRequest("long", prompt(6000), greedy(1))), light=True
                )

    asyncio.run(main())


def test_a_call_to_an_engine_that_computes_waits_for_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HeldDevice(monkeypatch)

    async def main() -> None:
        slow = {"speedup": 1.0, "step_s": 0.2}
        async with run_engine(lambda: make_mock(tmp_path, mock=slow)) as loop:
            await rest(loop)
            loop.between_steps(lambda engine: engine.submit(EngineRequest("r", prompt(5), greedy(1))), light=True)
            await until(lambda: device.is_busy)
            called = loop.between_steps(lambda engine: threading.current_thread().name, light=True)
            assert not called.done()
            assert await called == "engine"
            assert loop.is_stepping, "heartbeats must show a step that hangs, though no step has reported the request"
            device.finish()
            await until(lambda: not loop.is_stepping)

    asyncio.run(main())


def test_an_engine_whose_step_fails_where_it_was_called_dies_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with run_engine(lambda: failing(make_mock(tmp_path))) as loop:
            await rest(loop)
            monkeypatch.setattr(FailingEngine, "fatal", True)
            assert await loop.between_steps(lambda engine: "done", light=True) == "done"
            with pytest.raises(InvariantBroken, match="the device is gone"):
                await asyncio.wait_for(loop.between_steps(lambda engine: None, light=True), PATIENCE_S)
            assert isinstance(await loop.failed(), OSError)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "engine died" in caplog.text


@pytest.mark.parametrize("kind", [CannotServe, WrongSettings])
def test_an_engine_that_cannot_start_leaves_it_to_the_service_to_say_so(
    kind: type[CannotServe], caplog: pytest.LogCaptureFixture
) -> None:
    """It was logged with a traceback, though its message says all."""

    def build() -> EngineCore:
        raise kind("device=cuda: there is none")

    async def main() -> None:
        async with run_engine(build):
            raise AssertionError("it started")

    with pytest.raises(kind, match="there is none"):
        asyncio.run(main())
    assert not caplog.records


@given(ways=st.lists(st.sampled_from(["heavy", "light", "turn", "pause", "busy", "request"]), min_size=2, max_size=30))
@settings(max_examples=40, deadline=None)
def test_calls_run_in_the_order_in_which_they_are_made(
    tmp_path_factory: pytest.TempPathFactory, ways: list[str]
) -> None:
    """On this thread or the engine's. A caller that awaits a call at once has received all earlier outputs."""

    home = tmp_path_factory.getbasetemp()

    async def main() -> None:
        ran: list[int] = []
        heard: list[int] = []

        async with run_engine(lambda: make_mock(home, num_pages=512)) as loop:
            loop.on_output(lambda output: heard.append(output.stats.step))

            resumed: list[tuple[int, list[int]]] = []
            calls = []
            for i, way in enumerate(ways):
                if way == "turn":
                    await asyncio.sleep(0)
                elif way == "pause":
                    await asyncio.sleep(0.002)
                elif way == "busy":
                    time.sleep(0.002)  # the engine steps, but this thread reads no outputs
                elif way == "request":
                    request = EngineRequest(str(i), prompt(20, start=i), greedy(3, ignore_eos=True))
                    submit(loop, request)
                else:

                    def run(engine: Engine, i: int = i) -> int:
                        ran.append(i)
                        assert isinstance(engine, EngineCore)
                        if threading.current_thread() is threading.main_thread():
                            assert heard[-1:] == [engine._step] or engine._step == 1
                        return engine._step

                    future = loop.between_steps(run, light=way == "light")
                    # at once, as an `await` does: a task begun here may find a future that ended in between
                    future.add_done_callback(lambda done: resumed.append((done.result(), heard[-1:])))
                    calls.append(future)
            await asyncio.gather(*calls)
            await asyncio.sleep(0)
        assert len(resumed) == len(calls)
        for step, last_heard in resumed:
            assert last_heard >= [step] or step <= 1
        assert ran == [i for i, way in enumerate(ways) if way in ("heavy", "light")]

    asyncio.run(main())


def submit(loop: EngineLoop, request: EngineRequest) -> None:
    loop.between_steps(lambda engine: engine.submit(request), light=True)


async def rest(loop: EngineLoop) -> None:
    """Wait until its thread sleeps and all outputs are delivered."""
    assert isinstance(loop, ThreadedLoop)
    await until(loop._take)
    loop._own.release()
