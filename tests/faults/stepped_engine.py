"""The engine's loop without its thread: the same calls and steps, one after another on the event loop, by its clock."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from engine.core import EngineCore
from engine.loop import BLOCKED_TICK_S, EngineLoop, _call
from engine.ports import Engine

T = TypeVar("T")


class SteppedEngine(EngineLoop):
    """See `engine.loop.EngineLoop`. A step that computes takes, and says that it took, `step_s`."""

    _next: asyncio.Handle | None = None  # the turn that is due
    _next_is_step = False  # calls wait for it
    _is_over = False

    def __init__(self, build: Callable[[], Engine], step_s: float) -> None:
        super().__init__(build)
        self._step_s = step_s

    @property
    def core(self) -> EngineCore:
        assert isinstance(self._engine, EngineCore)
        return self._engine

    def post(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        future = super().post(call)
        if not self._is_over:
            self._wake()
        return future

    def call(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        if self._is_over or self._next_is_step:
            return self.post(call)
        future = super().call(call)
        if not self._calls.empty():
            self._wake()
        return future

    async def start(self) -> None:
        self._engine = self._build()
        self._told += 1
        self._receive(self._engine.step())

    async def stop(self) -> None:
        self._settle([_call(call, self.core) for call in self._come_in(0)])  # those that came before are still answered
        self._is_over = True
        self._end(None)

    def _wake(self) -> None:
        if self._next is not None and self._next_is_step:
            return
        if self._next is not None:
            self._next.cancel()
        self._next, self._next_is_step = asyncio.get_running_loop().call_soon(self._turn), True

    def _turn(self) -> None:
        """One round of `EngineLoop._run`."""
        if self._is_over:
            return
        loop, core = asyncio.get_running_loop(), self.core
        self._settle([_call(call, core) for call in self._come_in(0)])
        if self._broken is not None:
            raise self._broken
        output = core.step()
        output.stats = output.stats._replace(step_s=self._step_s)
        self._told += 1
        loop.call_soon(self._receive, output)
        self._next, self._next_is_step = None, False
        if core.has_work():
            self._next, self._next_is_step = loop.call_later(self._step_s, self._turn), True
        elif output.stats.num_waiting:
            self._next = loop.call_later(BLOCKED_TICK_S, self._turn)


@asynccontextmanager
async def run_stepped(build: Callable[[], Engine], step_s: float) -> AsyncIterator[SteppedEngine]:
    """See `engine.loop.run_engine`."""
    engine = SteppedEngine(build, step_s)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
