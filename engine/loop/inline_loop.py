"""An engine stepped on the event loop, because a device computes the steps.

An engine thread would contend with the event loop for the GIL.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Final, TypeVar

from engine.loop.engine_loop import BLOCKED_TICK_S, Call, Done, EngineLoop, call_on_loop, fail_call, resolve
from engine.ports import Engine, Pause, StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORTEST_S: Final = 1e-3  # uvloop treats shorter timers as zero, and would busy-wait


class InlineLoop(EngineLoop):
    """Runs calls at once, even while the device computes."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__(build)
        self._step: Iterator[Pause | StepOutput] | None = None  # waits for the device
        self._next: asyncio.Handle | None = None
        self._is_soon = False  # whether `_next` runs in the event loop's next turn
        self._context = Context()  # empty: a step must not inherit the request id of the call that started it

    def between_steps(self, call: Callable[[Engine], T], *, light: bool = False) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if self._ended.done():
            fail_call(future, self._ended.result())
        else:
            Call(call, future).made(self.engine).settle()
            self._soon()
        return future

    async def start(self) -> None:
        built: asyncio.Future[Engine] = self._loop.create_future()

        def hand_over(engine: Engine) -> None:
            if built.done():  # the start was cancelled
                engine.close()
            else:
                built.set_result(engine)

        def build() -> None:
            try:
                engine = self._build()
            except Exception as exc:  # noqa: BLE001 - raised where it is waited for
                call_on_loop(self._loop, Done(built, error=exc).settle)
                return
            call_on_loop(self._loop, hand_over, engine)

        # daemon: an exit does not wait for it
        thread = threading.Thread(target=build, name="engine", daemon=True)
        thread.start()
        self._engine = engine = await built
        thread.join()
        engine.on_loss(lambda error: call_on_loop(self._loop, self._end, error))
        self._receive(engine.step())

    async def stop(self) -> None:
        self._stopping = True
        if self._step is None or self._next is None:  # no step is in progress or will continue
            self._end(None)
        await asyncio.shield(self._ended)
        if self._engine is not None:
            self._engine.close()

    def _turn(self) -> None:
        self._next = None
        try:
            result = self._advance()
        except Exception as exc:
            log.exception("engine died")
            self._end(exc)
            return
        if isinstance(result, StepOutput):
            self._receive(result)
        elif result is not None and result.reserved:
            self._receive_early(result.reserved)

    def _advance(self) -> Pause | StepOutput | None:
        """Continue or begin a step. Returns None while other workers use the cores."""
        if self._step is None:
            if wait_s := self.engine.wait_s():
                self._later(wait_s)
                return None
            self._step = self.engine.stepping()
            self.is_stepping = True
        result = next(self._step)
        if isinstance(result, Pause):
            self._later(result.wait_s)
            return result
        self._step = None
        self.is_stepping = False
        if self._stopping:
            self._end(None)
        elif self.engine.has_work():
            self._soon()
        else:
            self.engine.rest()
            if result.stats.waits:
                self._later(BLOCKED_TICK_S)
        return result

    def _soon(self) -> None:
        if self._next is not None:
            if self._is_soon:
                return
            self._next.cancel()
        self._next, self._is_soon = self._loop.call_soon(self._turn, context=self._context), True

    def _later(self, wait_s: float) -> None:
        wait_s = max(wait_s, SHORTEST_S)
        self._next, self._is_soon = self._loop.call_later(wait_s, self._turn, context=self._context), False

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if self._next is not None:
            self._next.cancel()
        if self._engine is not None and error is None:
            self._engine.rest()
        resolve(self._ended, error)
