"""An engine on its own thread, with a queue of calls and batches of outputs.

While the thread sleeps, calls that need no device run on the caller's thread: waking a thread twice takes many
times as long as handing out pages.
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
    """The thread sleeps in its queue while the engine has no work."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__(build)
        self._calls: Queue[Call | None] = Queue()  # None: only wake up. No SimpleQueue: see `_come_in`
        self._own = threading.Lock()  # its holder may use the engine: the engine's thread, unless that sleeps
        self._unsettled = 0  # calls whose results have not been delivered
        self._told = self._heard = 0  # outputs made and delivered; the first is written under the lock
        self._num_waiting = 0  # requests that wait for pages, as of the last step
        self._broken: Exception | None = None  # error of a step made on the event loop's thread
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        # daemon: an exit during a model's load does not wait for it
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def post(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if self._ended.done() or self._broken is not None:
            future.set_exception(dead(self._broken or self._ended.result()))
        else:
            self._unsettled += 1
            self._calls.put(Call(call, future))
        return future

    def call(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
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
        """Returns when the engine is built."""
        self._thread.start()
        try:
            self._engine = await self._ready
        except asyncio.CancelledError:
            self._end_thread()  # it ends when it has loaded
            raise

    async def stop(self) -> None:
        self._end_thread()
        await asyncio.shield(self._ended)
        self._thread.join()

    def _end_thread(self) -> None:
        self._stopping = True
        self._calls.put(None)

    def _take(self) -> bool:
        """Take the engine if it rests and all outputs were delivered; `_own` gives it back."""
        if self._unsettled or self._stopping or self._ended.done() or not self._own.acquire(blocking=False):
            return False
        if self._told == self._heard and self._broken is None:
            return True
        self._own.release()
        return False

    def _go_on(self, engine: Engine) -> None:
        """Make the step after a call, unless it would compute."""
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
        error: BaseException | None = None
        self._own.acquire()  # a dead engine is never given back
        try:
            engine = self._build()
            self._hand_on(self._receive, engine.step())  # an empty step, for the size of the pool
            tell(self._loop, resolve, self._ready, engine)
            self._run(engine)
        except WrongSettings as exc:  # reported in one line by the service
            error = exc
        except Exception as exc:  # the process's edge: the service gets any error
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
        """Answer calls while the step waits for its device."""
        if pause.reserved:
            self._hand_on(self._receive_early, pause.reserved)
        if self._stopping:
            sleep(pause.wait_s)
        else:
            self._answer(engine, pause.wait_s)

    def _answer(self, engine: Engine, timeout_s: float | None, *, rests: bool = False) -> None:
        """Run the queued calls before the next step: a first token must not wait for it."""
        if calls := self._come_in(timeout_s, rests=rests):
            tell(self._loop, self._settle, [call.made(engine) for call in calls])

    def _come_in(self, timeout_s: float | None, *, rests: bool = False) -> list[Call]:
        """Queued calls; sleeps for the first one if there is none; None: without a limit.

        CPython's SimpleQueue.get with a timeout may hang if its thread is preempted at a bad moment. `rests`: the
        event loop's thread may have the engine meanwhile.
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
        """On the event loop's thread."""
        self._unsettled -= len(finished)
        for done in finished:
            done.settle()

    def _hand_on(self, receive: Callable[[T], None], what: T) -> None:
        """One turn of the loop later, so that callers awaiting earlier calls resume first."""
        self._told += 1
        tell(self._loop, self._loop.call_soon, receive, what)

    def _hear(self, output: StepOutput) -> None:
        try:
            super()._hear(output)
        finally:
            self._heard += 1  # a callback's calls run when all callbacks have run

    def _end(self, error: BaseException | None) -> None:
        """On the event loop's thread: complete what still waits."""
        resolve(self._ended, error)
        if not self._ready.done():
            self._ready.set_exception(error or dead(None))
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None and not call.future.done():
                call.future.set_exception(dead(error))
