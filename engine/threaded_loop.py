"""An engine on a thread of its own: calls go in through a queue, outputs come back in batches.

While the thread sleeps because there is nothing to compute, a call that needs no device runs where it is made: to wake a
thread, and to be woken by it, takes many times as long as to hand out pages.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from time import sleep
from typing import TypeVar

from components.startup import WrongSettings
from engine.loop import BLOCKED_TICK_S, Call, Done, EngineLoop, dead, resolve, tell
from engine.ports import Engine, Pause, StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")


class ThreadedLoop(EngineLoop):
    """See `EngineLoop`. The thread sleeps in its queue while the engine has no work, and steps as long as it has."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__(build)
        self._calls: Queue[Call | None] = Queue()  # None: look around. No SimpleQueue: see `_come_in`
        self._own = threading.Lock()  # who holds it may use the engine: its thread, unless that sleeps for want of work
        self._unsettled = 0  # calls in the queue, or whose results have not come from the thread
        self._told = self._heard = 0  # outputs of the engine; the first of them is written under the lock
        self._num_waiting = 0  # requests that wait for pages, as of the last step
        self._broken: Exception | None = None  # what a step raised that the event loop's thread made
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        # daemon: a process that is told to exit while a model loads does not wait for it
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def post(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """See `EngineLoop.post`: it runs on the engine's thread."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._ended.done() or self._broken is not None:
            future.set_exception(dead(self._broken or self._ended.result()))
        else:
            self._unsettled += 1
            self._calls.put(Call(call, future))
        return future

    def call(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """See `EngineLoop.call`."""
        if (engine := self._engine) is None or not self._take():
            return self.post(call)
        try:
            future: asyncio.Future[T] = self._loop.create_future()
            Call(call, future).made(engine).settle()
            self._go_on(engine)
        finally:
            self._own.release()
        return future

    async def start(self) -> None:
        """Start the thread; returns when the engine is built."""
        self._thread.start()
        try:
            self._engine = await self._ready
        except asyncio.CancelledError:
            self._end_thread()  # nobody else will: it ends when it has loaded
            raise

    async def stop(self) -> None:
        """Let the current step end, then the thread."""
        self._end_thread()
        await asyncio.shield(self._ended)
        self._thread.join()

    def _end_thread(self) -> None:
        self._stopping = True
        self._calls.put(None)

    def _take(self) -> bool:
        """Have the engine for this thread, if it rests and everything that it said was heard; to be given back by `_own`."""
        if self._unsettled or self._stopping or self._ended.done() or not self._own.acquire(blocking=False):
            return False
        if self._told == self._heard and self._broken is None:
            return True
        self._own.release()
        return False

    def _go_on(self, engine: Engine) -> None:
        """Make the step that follows a call, unless it would compute: that is for the engine's thread."""
        try:
            if not engine.computes():
                output = engine.step()
                self._told += 1
                self._loop.call_soon(self._receive, output)
                ticks, self._num_waiting = bool(self._num_waiting), output.stats.num_waiting
                if not engine.has_work() and (ticks or not self._num_waiting):
                    return
        except Exception as exc:  # noqa: BLE001 - the thread raises it: it ends of what its own steps raise, too
            self._broken = exc
        self._calls.put(None)

    def _main(self) -> None:
        """The engine's thread."""
        error: BaseException | None = None
        self._own.acquire()  # an engine that died is never given back
        try:
            engine = self._build()
            self._hand_on(self._receive, engine.step())  # nothing to do yet: the size of the pool
            tell(self._loop, resolve, self._ready, engine)
            self._run(engine)
        except WrongSettings as exc:  # the service says so in one line
            error = exc
        except Exception as exc:  # the process's edge: whatever it was, the service learns of it
            log.exception("engine died")
            error = exc
        tell(self._loop, self._end, error)

    def _run(self, engine: Engine) -> None:
        wait_s = 0.0
        while True:
            if engine.has_work():
                self._answer(engine, wait_s)
            else:
                engine.rest()
                self._answer(engine, BLOCKED_TICK_S if self._num_waiting else None, rests=True)
            if self._stopping:
                engine.rest()
                return
            if self._broken is not None:
                raise self._broken
            if wait_s := engine.wait_s():
                continue  # calls are answered meanwhile
            for said in engine.stepping():
                if isinstance(said, Pause):
                    self._pause(engine, said)
                else:
                    self._num_waiting = said.stats.num_waiting
                    self._hand_on(self._receive, said)

    def _pause(self, engine: Engine, pause: Pause) -> None:
        """A step waits for its device: answer meanwhile."""
        if pause.reserved:
            self._hand_on(self._receive_early, pause.reserved)
        if self._stopping:
            sleep(pause.wait_s)
        else:
            self._answer(engine, pause.wait_s)

    def _answer(self, engine: Engine, timeout_s: float | None, *, rests: bool = False) -> None:
        """Run the calls that have come in; they are answered before the next step: a first token should not wait for it."""
        if calls := self._come_in(timeout_s, rests=rests):
            tell(self._loop, self._settle, [call.made(engine) for call in calls])

    def _come_in(self, timeout_s: float | None, *, rests: bool = False) -> list[Call]:
        """Calls, after sleeping for the first one if there is none; None: however long that takes.

        With a timeout, `get` of CPython's SimpleQueue waits for ever when its thread loses the processor at the wrong moment.
        `rests`: the event loop's thread may have the engine until then.
        """
        calls: list[Call] = []
        if rests:
            self._own.release()
        try:
            call = self._calls.get_nowait() if timeout_s == 0 else self._calls.get(timeout=timeout_s)
            while True:
                if call is not None:
                    calls.append(call)
                call = self._calls.get_nowait()
        except Empty:
            pass
        finally:
            if rests:
                self._own.acquire()
        return calls

    def _settle(self, finished: Sequence[Done]) -> None:
        """Results of calls, on the event loop's thread."""
        self._unsettled -= len(finished)
        for done in finished:
            done.settle()

    def _hand_on(self, receive: Callable[[T], None], what: T) -> None:
        """One turn of the loop later, so that whoever awaits a call that ran before this step resumes first."""
        self._told += 1
        tell(self._loop, self._loop.call_soon, receive, what)

    def _hear(self, output: StepOutput) -> None:
        try:
            super()._hear(output)
        finally:
            self._heard += 1  # what a callback calls runs when all have heard

    def _end(self, error: BaseException | None) -> None:
        """The thread is over, on the event loop's thread: nobody waits for it any longer."""
        resolve(self._ended, error)
        if not self._ready.done():
            self._ready.set_exception(error or dead(None))
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None and not call.future.done():
                call.future.set_exception(dead(error))
