"""An engine on its own thread, with a queue of calls.

While the engine's thread sleeps, a call that touches no device runs on the caller's thread: waking the engine's thread
takes far longer.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from contextvars import Context
from queue import Empty, Queue
from time import sleep
from typing import TypeVar

from components.startup import CannotServe
from engine.loop.engine_loop import BLOCKED_TICK_S, Call, Done, EngineLoop, call_on_loop, dead, fail_call, resolve
from engine.ports import Engine, Pause, StepOutput

log = logging.getLogger(__name__)

T = TypeVar("T")


class ThreadedLoop(EngineLoop):
    def __init__(self, build: Callable[[], Engine]) -> None:
        super().__init__(build)
        self._calls: Queue[Call | None] = Queue()  # None: wake up. CPython's SimpleQueue.get may hang with a timeout
        self._own = threading.Lock()  # held by the engine's thread, unless it sleeps
        self._unsettled = 0  # calls whose result was not delivered yet
        self._num_made = self._num_delivered = 0  # outputs; `_num_made` changes under the lock
        self._waits = False  # whether work waits for pages or a disk
        self._broken: Exception | None = None  # an error outside the engine's thread, which raises it
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        # daemon: an exit does not wait for it
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def between_steps(self, call: Callable[[Engine], T], *, light: bool = False) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if light and self._engine is not None and self._take():
            try:
                Call(call, future).made(self._engine).settle()
                self._light_step(self._engine)
            finally:
                self._own.release()
        elif self._ended.done() or self._broken is not None:
            fail_call(future, self._broken or self._ended.result())
        else:
            self._unsettled += 1
            self._calls.put(Call(call, future))
        return future

    async def start(self) -> None:
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
        """Lock `_own` if the engine is idle and all outputs were delivered."""
        if self._unsettled or self._stopping or self._ended.done() or not self._own.acquire(blocking=False):
            return False
        if self._num_made == self._num_delivered and self._broken is None:
            return True
        self._own.release()
        return False

    def _light_step(self, engine: Engine) -> None:
        try:
            if not engine.computes():
                output = engine.step()
                self._num_made += 1
                self._loop.call_soon(self._receive, output, context=Context())  # not of the call's request alone
                ticks, self._waits = self._waits, output.stats.waits
                if not engine.has_work() and (ticks or not self._waits):
                    return
        except Exception as exc:  # noqa: BLE001 - the engine's thread raises it
            self._broken = exc
        self._calls.put(None)

    def _main(self) -> None:
        error: BaseException | None = None
        self._own.acquire()  # not released after an error
        try:
            with closing(self._build()) as engine:
                engine.on_loss(self._lose)
                self._send_to_loop(self._receive, engine.step())  # an empty step reports the pool's size
                call_on_loop(self._loop, resolve, self._ready, engine)
                self._run(engine)
        except CannotServe as exc:  # the service reports it
            error = exc
        except Exception as exc:
            log.exception("engine died")
            error = exc
        call_on_loop(self._loop, self._end, error)

    def _lose(self, error: Exception) -> None:
        """Stop the engine's thread, from another one."""
        self._broken = error
        self._calls.put(None)

    def _run(self, engine: Engine) -> None:
        wait_s = 0.0
        while True:
            if engine.has_work() or self._stopping or self._broken is not None:  # a pause may have taken the wake-up
                self._run_calls(engine, wait_s)
            else:
                engine.rest()
                self._run_calls(engine, BLOCKED_TICK_S if self._waits else None, rests=True)
            if self._stopping:
                engine.rest()
                return
            if self._broken is not None:
                raise self._broken
            if wait_s := engine.wait_s():
                continue  # run calls in the meantime
            self.is_stepping = True
            for output in engine.stepping():
                if isinstance(output, Pause):
                    self._pause(engine, output)
                else:
                    self._waits = output.stats.waits
                    self._send_to_loop(self._receive, output)
            self.is_stepping = False

    def _pause(self, engine: Engine, pause: Pause) -> None:
        if pause.reserved:
            self._send_to_loop(self._receive_early, pause.reserved)
        if self._stopping:
            sleep(pause.wait_s)
        else:
            self._run_calls(engine, pause.wait_s)

    def _run_calls(self, engine: Engine, timeout_s: float | None, *, rests: bool = False) -> None:
        """Run queued calls now, because a first token must not wait for a step."""
        if calls := self._take_calls(timeout_s, rests=rests):
            call_on_loop(self._loop, self._settle, [call.made(engine) for call in calls])

    def _take_calls(self, timeout_s: float | None, *, rests: bool = False) -> list[Call]:
        """Return the queued calls, or wait for one. If it `rests`, the event loop's thread may use the engine meanwhile."""
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
        self._unsettled -= len(finished)
        for done in finished:
            done.settle()

    def _send_to_loop(self, receive: Callable[[T], None], what: T) -> None:
        """Deliver in the next turn of the event loop, so that tasks that await earlier calls resume first."""
        self._num_made += 1
        call_on_loop(self._loop, self._loop.call_soon, receive, what)

    def _deliver(self, output: StepOutput) -> None:
        try:
            super()._deliver(output)
        finally:
            self._num_delivered += 1  # now, so that calls of a callback run after all callbacks

    def _end(self, error: BaseException | None) -> None:
        """Complete all futures, on the event loop's thread."""
        resolve(self._ended, error)
        if not self._ready.done():
            self._ready.set_exception(error or dead(None))
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None:
                fail_call(call.future, error)
