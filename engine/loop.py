"""The engine on a thread of its own, and asyncio beside it: calls go in through a queue, outputs come back in batches.

While the thread sleeps because there is nothing to compute, a call that needs no device runs where it is made: to wake a
thread, and to be woken by it, takes many times as long as to hand out pages.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from time import sleep
from typing import Any, Final, TypeVar

from components.errors import InvariantBroken
from engine.choose import build_engine
from engine.config import EngineConfig
from engine.model.progress import Progress, silent
from engine.ports import Engine, Reserved, StepOutput, StepStats

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKED_TICK_S: Final = 0.25  # how often a step is counted while requests wait for pages that others hold


@dataclass(frozen=True, slots=True)
class Call:
    """A function for the engine's thread, and the future that gets what it returns or raises."""

    run: Callable[[Engine], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Done:
    """A call that ran."""

    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


@asynccontextmanager
async def start_engine(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent
) -> AsyncIterator["EngineLoop"]:
    """Load `model` on the engine's thread, then run it there until the context is left.

    `progress` is called on the event loop's thread. Raises: what loading raises, such as ModelUnavailable.
    """
    loop = asyncio.get_running_loop()

    def report(task: str, done: int, total: int) -> None:
        _tell(loop, progress, task, done, total)

    async with run_engine(lambda: build_engine(model, config, state_dir, report)) as engine:
        yield engine


@asynccontextmanager
async def run_engine(build: Callable[[], Engine]) -> AsyncIterator["EngineLoop"]:
    """Build an engine on a new thread and run it there until the context is left; its last `step` is waited for.

    With `pipeline` one more batch may then be on the device; nobody hears of it.
    """
    running = EngineLoop(build)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


class EngineLoop:
    """One engine, one thread. Everything public here belongs to the event loop's thread.

    The thread sleeps in its queue while the engine has no work, and steps as long as it has.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.stats = StepStats()  # of the latest step
        self._build = build
        self._loop = asyncio.get_running_loop()
        self._calls: Queue[Call | None] = Queue()  # None: look around. No SimpleQueue: see `_come_in`
        self._own = threading.Lock()  # who holds it may use the engine: its thread, unless that sleeps for want of work
        self._unsettled = 0  # calls in the queue, or whose results have not come from the thread
        self._told = self._heard = 0  # outputs of the engine; the first of them is written under the lock
        self._num_waiting = 0  # requests that wait for pages, as of the last step
        self._broken: Exception | None = None  # what a step raised that the event loop's thread made
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._callbacks: list[Callable[[StepOutput], None]] = []
        self._stopping = False
        self._engine: Engine | None = None
        # daemon: a process that is told to exit while a model loads does not wait for it
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def engine(self) -> Engine:
        """For kv_region, max_context and peek_prefix; everything else goes through `post` and `call`."""
        assert self._engine is not None, "the engine is not loaded yet"
        return self._engine

    def post(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Run `call(engine)` on the engine's thread, while it waits or between two steps; what it raises, the future raises.

        Who awaits the future itself resumes before callbacks get the output of a step that came after the call: the
        first token that `deliver` returns is not overtaken by the second.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        if self._ended.done() or self._broken is not None:
            future.set_exception(_dead(self._broken or self._ended.result()))
        else:
            self._unsettled += 1
            self._calls.put(Call(call, future))
        return future

    def call(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """The same for a `call` that touches no device: it runs at once if the engine rests, and its future is done then.

        Whatever was posted before it has run, and whoever waited for that, or for outputs, has been told. Who awaits the
        future at once resumes before callbacks get the output of the step that follows; a done-callback comes after them.
        """
        if (engine := self._engine) is None or not self._take():
            return self.post(call)
        try:
            future: asyncio.Future[T] = self._loop.create_future()
            _settle([_call(Call(call, future), engine)])
            self._go_on(engine)
        finally:
            self._own.release()
        return future

    def on_output(self, callback: Callable[[StepOutput], None]) -> None:
        """Have `callback` called with the output of every step from now on, in order, also where it is empty."""
        self._callbacks.append(callback)

    async def failed(self) -> BaseException:
        """Wait until the engine's thread dies of an error, and return it. A dead engine must not look alive."""
        error = await asyncio.shield(self._ended)
        return error or _dead(None)

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
            _tell(self._loop, _resolve, self._ready, engine)
            self._run(engine)
        except Exception as exc:  # the process's edge: whatever it was, the service learns of it
            log.exception("engine died")
            error = exc
        _tell(self._loop, self._end, error)

    def _run(self, engine: Engine) -> None:
        wait_s = 0.0

        def meanwhile(reserved: Sequence[Reserved], left_s: float) -> None:
            if reserved:
                self._hand_on(self._receive_early, list(reserved))
            if self._stopping:
                sleep(left_s)
            else:
                self._answer(engine, left_s)

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
            output = engine.step(meanwhile)
            self._num_waiting = output.stats.num_waiting
            self._hand_on(self._receive, output)

    def _answer(self, engine: Engine, timeout_s: float | None, *, rests: bool = False) -> None:
        """Run the calls that have come in; they are answered before the next step: a first token should not wait for it."""
        if calls := self._come_in(timeout_s, rests=rests):
            _tell(self._loop, self._settle, [_call(call, engine) for call in calls])

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
        _settle(finished)

    def _hand_on(self, receive: Callable[[T], None], what: T) -> None:
        """One turn of the loop later, so that whoever awaits a call that ran before this step resumes first."""
        self._told += 1
        _tell(self._loop, self._loop.call_soon, receive, what)

    def _receive(self, output: StepOutput) -> None:
        """One step's output, on the event loop's thread."""
        self.stats = output.stats
        self._hear(output)

    def _receive_early(self, reserved: list[Reserved]) -> None:
        """Requests that got pages while a step was under way; none of its tokens is counted twice."""
        stats = self.stats._replace(prompt_tokens=0, decode_tokens=0, step_s=0.0)
        self._hear(StepOutput(reserved=reserved, stats=stats))

    def _hear(self, output: StepOutput) -> None:
        try:
            for callback in self._callbacks:
                callback(output)
        finally:
            self._heard += 1  # what a callback calls runs when all have heard

    def _end(self, error: BaseException | None) -> None:
        """The thread is over, on the event loop's thread: nobody waits for it any longer."""
        _resolve(self._ended, error)
        if not self._ready.done():
            self._ready.set_exception(error or _dead(None))
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None and not call.future.done():
                call.future.set_exception(_dead(error))


def _call(call: Call, engine: Engine) -> Done:
    try:
        return Done(call.future, result=call.run(engine))
    except Exception as exc:  # noqa: BLE001 - the request's edge: its caller gets it through the future
        return Done(call.future, error=exc)


def _settle(finished: Sequence[Done]) -> None:
    for done in finished:
        if done.future.done():  # its caller was cancelled
            continue
        if done.error is not None:
            done.future.set_exception(done.error)
        else:
            done.future.set_result(done.result)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call on the event loop's thread; a loop that was closed while the model loaded has nobody to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _dead(error: BaseException | None) -> InvariantBroken:
    return InvariantBroken(f"the engine is not running: {error or 'it was stopped'}")
