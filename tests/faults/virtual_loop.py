"""An event loop whose clock jumps to the next timer, and processes in it that can be stopped, continued and killed.

A callback's context names its process. Callbacks and timers of a stopped process wait until it continues, as after SIGSTOP;
those of a dead one never run.
"""

import asyncio
import contextvars
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from typing import Any, Final, TypeVar
from unittest import mock
from weakref import WeakSet

from components.kv_transfer import backend
from components.messaging import (
    bus,
    clocks,
    fleet,
    heartbeat_sender,
    kv_publisher,
    kv_subscriber,
    liveness,
    outbox,
    presence,
)
from engine.core import engine_core
from engine.mock import mock_runner
from services.decode import prefill_client
from services.frontend import decode_choice, exchange

T = TypeVar("T")

THREAD_S: Final = 0.0005  # duration of a call on another thread
WALL_S: Final = 1_700_000_000.0  # Unix time at which every run begins


class Running(StrEnum):
    RUNS = auto()
    STOPPED = auto()
    DEAD = auto()


class Process:
    """The tasks and callbacks of one process of the mesh."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = Running.RUNS
        self.skew_s = 0.0  # of its wall clock
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.continued: list[Callable[[], None]] = []  # called once, when it continues
        self._held: list[asyncio.Handle] = []

    @property
    def runs(self) -> bool:
        return self.state is Running.RUNS

    @property
    def is_dead(self) -> bool:
        return self.state is Running.DEAD

    def hold(self, handle: asyncio.Handle) -> None:
        """Run the callback when this process continues."""
        self._held.append(handle)

    def go_on(self) -> None:
        """Continue after SIGSTOP. A dead process stays dead, but its tasks run so that they can end."""
        if not self.is_dead:
            self.state = Running.RUNS
        loop = asyncio.get_running_loop()
        held, self._held = self._held, []
        for handle in held:
            loop._ready.append(handle)  # type: ignore[attr-defined]
        waiting, self.continued = self.continued, []
        for callback in waiting:
            callback()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        return asyncio.get_running_loop().create_task(work, name=f"{self.name} {name}", context=self.context())

    def context(self) -> contextvars.Context:
        """Make a context for callbacks of this process."""
        context = contextvars.Context()
        context.run(_process.set, self)
        return context

    def live_tasks(self) -> list["asyncio.Task[Any]"]:
        return [task for task in self.tasks if not task.done()]


_process: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar("process", default=None)


def current_process() -> Process | None:
    return _process.get()


class _Leaping(selectors.DefaultSelector):
    """A sleep takes no time."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("hang: nothing will ever happen again")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _Leaping()
        self._zombies = False
        super().__init__(self._leaping)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._leaping.now_s

    def bury(self) -> None:
        """Run dead processes too, so that their tasks can end."""
        self._zombies = True

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        process = _process.get() if context is None else context.get(_process)
        if process is None or self._may_run(process):
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        process.hold(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        context = contextvars.copy_context() if context is None else context  # an empty one is false
        timer: list[asyncio.TimerHandle] = []

        def due() -> None:
            process = _process.get()
            if process is None or self._may_run(process):
                callback(*args)
            else:
                process.hold(asyncio.Handle(late, (), self, context))

        def late() -> None:
            if not timer[0].cancelled():
                callback(*args)

        timer.append(super().call_at(when, due, context=context))
        return timer[0]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run `func` on the loop a little later, in the process of the caller."""

        async def work() -> Any:
            await asyncio.sleep(THREAD_S)
            return func(*args)

        return self.create_task(work())

    def _may_run(self, process: Process) -> bool:
        return process.runs or (self._zombies and process.is_dead)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> "asyncio.Task[Any]":
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = _process.get() if context is None else context.get(_process)
    if process is not None:
        process.tasks.add(task)
    return task


class VirtualTime:
    """Replaces the `time` module; perf_counter(), for durations, is the real one."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def time(self) -> float:
        process = current_process()
        return WALL_S + self._loop.time() + (0.0 if process is None else process.skew_s)

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


class DeviceTime:
    """Replaces the `time` module of the mock's runner."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.perf_counter = loop.time

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"an engine waited for its device, {seconds} s, instead of letting others go on")


@contextmanager
def _clock(loop: VirtualLoop) -> Iterator[None]:
    clock = VirtualTime(loop)

    class Liveness(liveness.Liveness):  # its clock is a default, taken at import
        def __init__(self, book: Any, role: Any) -> None:
            super().__init__(book, role, clock.monotonic)

    with (
        mock.patch.object(clocks, "time", clock),
        mock.patch.object(liveness, "time", clock),
        mock.patch.object(heartbeat_sender, "time", clock),
        mock.patch.object(liveness, "Liveness", Liveness),
        mock.patch.object(fleet, "time", clock),
        mock.patch.object(kv_publisher, "time", clock),
        mock.patch.object(kv_subscriber, "time", clock),
        mock.patch.object(decode_choice, "time", clock),
        mock.patch.object(prefill_client, "time", clock),
        mock.patch.object(backend, "time", clock),
        mock.patch.object(presence, "time", clock),
        mock.patch.object(outbox, "time", clock),
        mock.patch.object(bus, "time", clock),
        mock.patch.object(exchange, "time", clock),
        mock.patch.object(mock_runner, "time", DeviceTime(loop)),
        mock.patch.object(engine_core, "perf_counter", loop.time),
    ):
        yield


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` on a new virtual loop, whose clock begins at zero."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        with _clock(loop):
            return runner.run(main())
