"""For tests of engines with asyncio."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.loop.engine_loop import EngineLoop
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Pause, StepOutput
from engine.start import run_engine
from tests.engine.tiny_engine import make_engine


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
        await loop.between_steps(lambda engine: engine.submit(EngineRequest(name, ids, sampling)))
        await self.ended[name].wait()
        return self.tokens[name]


@asynccontextmanager
async def running(tiny: LoadedModel, *, thread: bool = True, **changes: object) -> AsyncIterator[EngineLoop]:
    async with run_engine(lambda: make_engine(tiny, **changes), thread=thread) as loop:
        yield loop


class FailingEngine(EngineCore):
    """Fails in the next step once `fatal` is set."""

    fatal = False

    def _stepping(self, *, pauses: bool) -> Iterator[Pause | StepOutput]:
        if self.fatal:
            raise OSError("the device is gone")
        return super()._stepping(pauses=pauses)


def failing(engine: EngineCore) -> EngineCore:
    engine.__class__ = FailingEngine
    return engine


def processor_s() -> float:
    """Processor time in seconds of this thread and of engines' threads: neither other threads nor stalls count."""
    engines = [one.ident for one in threading.enumerate() if one.name == "engine" and one.ident is not None]
    return time.thread_time() + sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in engines)
