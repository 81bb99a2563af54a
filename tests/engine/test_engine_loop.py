import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import InvariantBroken, PromptTooLong
from engine.core import EngineCore
from engine.loop import EngineLoop, run_engine, start_engine
from engine.model.errors import ModelUnavailable
from engine.model.load import LoadedModel
from engine.ports import Engine, EngineRequest, Meanwhile, Phase, SamplingParams, StepOutput
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import alone, greedy, make_engine, prompt, small

pytestmark = pytest.mark.usefixtures("pipeline")


class Listener:
    """Collects tokens on the event loop's thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.threads: set[int] = set()
        self.outputs: list[StepOutput] = []
        loop.on_output(self.take)

    def take(self, output: StepOutput) -> None:
        self.threads.add(threading.get_ident())
        self.outputs.append(output)
        for tokens in output.tokens:
            self.tokens.setdefault(tokens.request_id, []).extend(tokens.token_ids)
            if tokens.finish:
                self.ended[tokens.request_id].set()

    async def ask(self, loop: EngineLoop, name: str, ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        self.ended[name] = asyncio.Event()
        await loop.post(lambda engine: engine.submit(EngineRequest(name, ids, sampling)))
        await self.ended[name].wait()
        return self.tokens[name]


@asynccontextmanager
async def running(tiny: LoadedModel, **changes: object) -> AsyncIterator[EngineLoop]:
    async with run_engine(lambda: make_engine(tiny, **changes)) as loop:
        yield loop


def test_an_engine_starts_from_a_directory_and_answers(tiny_dir: Path, tiny: LoadedModel) -> None:
    async def main() -> None:
        told: list[tuple[str, int, int]] = []
        async with start_engine(str(tiny_dir), small(), Path("unused"), lambda *args: told.append(args)) as loop:
            assert loop.stats.total_pages == loop.stats.free_pages == 64
            assert loop.engine.max_context == 512
            assert loop.engine.peek_prefix(prompt(40)) == 0
            assert await Listener(loop).ask(loop, "r", prompt(20), greedy(9)) == alone(tiny, prompt(20), greedy(9))
        assert told[0][0] == "Loading weights"
        assert told[-1][1] == told[-1][2]

    asyncio.run(main())


def test_many_requests_at_once_get_their_own_tokens_on_the_loops_thread(tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny) as loop:
            listener = Listener(loop)
            asked = [listener.ask(loop, f"r{i}", prompt(10 + i, start=i), greedy(12)) for i in range(8)]
            answers = await asyncio.gather(*asked)
            assert answers == [alone(tiny, prompt(10 + i, start=i), greedy(12)) for i in range(8)]
            assert listener.threads == {threading.get_ident()}
            await asyncio.sleep(0)
            assert loop.stats == listener.outputs[-1].stats

    asyncio.run(main())


def test_what_a_call_returns_and_raises_reaches_its_caller(tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny) as loop:
            assert await loop.post(lambda engine: (engine.max_context, threading.current_thread().name)) == (
                512,
                "engine",
            )
            with pytest.raises(PromptTooLong):
                await loop.post(lambda engine: engine.submit(EngineRequest("r", prompt(600), greedy(1))))
            assert await Listener(loop).ask(loop, "next", prompt(5), greedy(3)), "the thread lives on"

    asyncio.run(main())


def test_an_idle_engine_sleeps_and_wakes_at_once(tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny) as loop:
            listener = Listener(loop)
            await listener.ask(loop, "warm", prompt(5), greedy(3))
            await asyncio.sleep(0.05)
            before, cpu = len(listener.outputs), time.process_time()
            await asyncio.sleep(0.5)
            assert len(listener.outputs) == before
            assert time.process_time() - cpu < 0.2
            asked = time.perf_counter()
            await loop.post(lambda engine: None)
            assert time.perf_counter() - asked < 0.2

    asyncio.run(main())


def test_requests_that_wait_for_held_pages_keep_the_step_counter_moving(tiny: LoadedModel) -> None:
    """A counter that stands still while work waits means a hung engine to whoever watches it."""

    async def main() -> None:
        async with running(tiny, num_pages=4) as loop:
            await loop.post(lambda engine: engine.submit(EngineRequest("d", prompt(60), greedy(3), Phase.DECODE)))
            await loop.post(lambda engine: engine.cancel("d"))
            listener = Listener(loop)
            asked = asyncio.create_task(listener.ask(loop, "r", prompt(20), greedy(3)))
            await asyncio.sleep(0.1)
            before = loop.stats
            assert (before.num_waiting, before.num_held) == (1, 1)
            await asyncio.sleep(0.6)
            assert before.step < loop.stats.step < before.step + 10
            await loop.post(lambda engine: engine.release("d"))
            assert await asked

    asyncio.run(main())


def test_what_deliver_returns_is_not_overtaken_by_the_next_step(tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny) as loop:
            told: list[str] = []
            reserved = asyncio.Event()

            def take(output: StepOutput) -> None:
                told.extend(tokens.request_id for tokens in output.tokens)
                if output.reserved:
                    reserved.set()

            loop.on_output(take)
            request = EngineRequest("r", prompt(5), greedy(4, ignore_eos=True), Phase.DECODE)
            await loop.post(lambda engine: engine.submit(request))
            await reserved.wait()
            delivered = loop.post(lambda engine: engine.deliver("r", 7))
            time.sleep(0.1)  # the engine takes its steps while nobody listens
            told.append(f"first token {(await delivered)[0].token_ids}")
            await asyncio.sleep(0.05)
            assert told == ["first token [7]", "r", "r", "r"]

    asyncio.run(main())


def test_pages_and_answers_are_had_while_a_device_computes(tmp_path: Path) -> None:
    async def main() -> None:
        slow = {"speedup": 1.0, "step_s": 2.0}
        async with run_engine(lambda: make_mock(tmp_path, mock=slow)) as loop:
            told: list[str] = []
            reserved = asyncio.Event()

            def take(output: StepOutput) -> None:
                told.extend(tokens.request_id for tokens in output.tokens)
                told.extend(one.request_id for one in output.reserved)
                if output.reserved:
                    assert output.stats.step_s == 0.0
                    reserved.set()

            loop.on_output(take)
            await loop.post(lambda engine: engine.submit(EngineRequest("computes", prompt(5), greedy(1))))
            await asyncio.sleep(0.1)
            request = EngineRequest("waits", prompt(5), greedy(4), Phase.DECODE)
            await loop.post(lambda engine: engine.submit(request))
            await reserved.wait()
            assert await loop.post(lambda engine: engine.deliver("waits", 7))
            assert told == ["waits"]
            await loop.post(lambda engine: engine.cancel("waits"))
            while "computes" not in told:
                await asyncio.sleep(0.01)

    asyncio.run(main())


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

            submitted = loop.call(submit)
            assert submitted.done()
            assert await submitted == here
            assert not listener.outputs, "the caller goes on before anybody hears of the step that follows"
            await asyncio.sleep(0)
            assert [one.request_id for one in listener.outputs[-1].reserved] == ["r"], "and no thread was waited for"
            listener.ended["r"] = asyncio.Event()
            delivered = loop.call(lambda engine: (engine.deliver("r", 7), threading.current_thread().name))
            assert delivered.done()
            [first], where = await delivered
            assert (first.token_ids, where) == ([7], here)
            await listener.ended["r"].wait()
            assert len(listener.tokens["r"]) == 3
            with pytest.raises(PromptTooLong):
                await loop.call(lambda engine: engine.submit(EngineRequest("long", prompt(6000), greedy(1))))

    asyncio.run(main())


def test_a_call_to_an_engine_that_computes_waits_for_its_thread(tmp_path: Path) -> None:
    async def main() -> None:
        slow = {"speedup": 1.0, "step_s": 0.2}
        async with run_engine(lambda: make_mock(tmp_path, mock=slow)) as loop:
            await rest(loop)
            loop.call(lambda engine: engine.submit(EngineRequest("r", prompt(5), greedy(2, ignore_eos=True))))
            await asyncio.sleep(0.05)
            called = loop.call(lambda engine: threading.current_thread().name)
            assert not called.done()
            assert await called == "engine"

    asyncio.run(main())


@given(ways=st.lists(st.sampled_from(["post", "call", "turn", "pause", "busy", "request"]), min_size=2, max_size=30))
@settings(max_examples=40, deadline=None)
def test_calls_run_in_the_order_in_which_they_are_made(
    tmp_path_factory: pytest.TempPathFactory, ways: list[str]
) -> None:
    """Here or on the engine's thread, and whoever waits for one has heard all that the engine said before it ran."""

    home = tmp_path_factory.getbasetemp()

    async def main() -> None:
        ran: list[int] = []
        heard: list[int] = []

        async with run_engine(lambda: make_mock(home, num_pages=512)) as loop:
            loop.on_output(lambda output: heard.append(output.stats.step))

            async def wait(future: asyncio.Future[int]) -> None:
                step = await future
                assert heard[-1:] >= [step] or step <= 1

            tasks = []
            for i, way in enumerate(ways):
                if way == "turn":
                    await asyncio.sleep(0)
                elif way == "pause":
                    await asyncio.sleep(0.002)
                elif way == "busy":
                    time.sleep(0.002)  # the engine goes on, and nobody listens
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

                    future = loop.call(run) if way == "call" else loop.post(run)
                    tasks.append(asyncio.create_task(wait(future)))
            await asyncio.gather(*tasks)
        assert ran == [i for i, way in enumerate(ways) if way in ("post", "call")]

    asyncio.run(main())


def submit(loop: EngineLoop, request: EngineRequest) -> None:
    loop.call(lambda engine: engine.submit(request))


async def rest(loop: EngineLoop) -> None:
    """Until its thread sleeps and everything that it said was heard."""
    for _ in range(500):
        if loop._take():
            loop._own.release()
            return
        await asyncio.sleep(0.002)
    raise AssertionError("never rested")


class FailingEngine(EngineCore):
    """Dies in the step after it was told to."""

    fatal = False

    def step(self, meanwhile: Meanwhile | None = None) -> StepOutput:
        if self.fatal:
            raise OSError("the device is gone")
        return super().step(meanwhile)


def test_a_dead_engine_does_not_look_alive(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Engine:
        engine = make_engine(tiny)
        engine.__class__ = FailingEngine
        return engine

    def kill(engine: Engine) -> str:
        FailingEngine.fatal = True
        return "done"

    async def main() -> None:
        async with run_engine(build) as loop:
            watcher = asyncio.create_task(loop.failed())
            assert await loop.post(kill) == "done"
            assert isinstance(await watcher, OSError)
            with pytest.raises(InvariantBroken, match="the device is gone"):
                await loop.post(lambda engine: None)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    FailingEngine.fatal = False
    assert "engine died" in caplog.text


def test_an_engine_whose_step_fails_where_it_was_called_dies_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Engine:
        engine = make_mock(tmp_path)
        engine.__class__ = FailingEngine
        return engine

    async def main() -> None:
        async with run_engine(build) as loop:
            await rest(loop)
            monkeypatch.setattr(FailingEngine, "fatal", True)
            assert await loop.call(lambda engine: "done") == "done"
            with pytest.raises(InvariantBroken, match="the device is gone"):
                await asyncio.wait_for(loop.call(lambda engine: None), 5)
            assert isinstance(await loop.failed(), OSError)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "engine died" in caplog.text


def test_calls_in_the_queue_of_an_engine_that_stops_are_refused(tiny: LoadedModel) -> None:
    async def main() -> None:
        async with running(tiny) as loop:
            pass
        with pytest.raises(InvariantBroken, match="stopped"):
            await loop.post(lambda engine: None)
        assert not any(thread.name == "engine" for thread in threading.enumerate())

    asyncio.run(main())


def test_an_error_while_loading_is_raised_where_the_engine_is_started(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ModelUnavailable, match="no model 'nonsense'"):
            async with start_engine("nonsense", small(), tmp_path):
                pass

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_no_thread_behind(tiny: LoadedModel) -> None:
    go_on = threading.Event()

    def slow() -> Engine:
        go_on.wait(10)
        return make_engine(tiny)

    async def main() -> None:
        starting = asyncio.create_task(run_engine(slow).__aenter__())
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        go_on.set()
        await eventually(lambda: not any(thread.name == "engine" for thread in threading.enumerate()))

    asyncio.run(main())


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(200):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never became true")
