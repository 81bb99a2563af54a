"""Base of the loops that run an engine next to asyncio."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from components.errors import InvariantBroken
from components.wire.step_stats import StepStats
from engine.ports import Engine, Exposed, StepOutput

T = TypeVar("T")

BLOCKED_TICK_S: Final = 0.25  # interval between steps while work waits for pages or a disk
REPORT_AFTER_S: Final = 0.003  # so that a step's tokens and pages are sent first


@dataclass(frozen=True, slots=True)
class Call:
    run: Callable[[Engine], Any]
    future: asyncio.Future[Any]

    def made(self, engine: Engine) -> "Done":
        try:
            return Done(self.future, result=self.run(engine))
        except Exception as exc:  # noqa: BLE001 - the request's edge: its caller gets it through the future
            return Done(self.future, error=exc)


@dataclass(frozen=True, slots=True)
class Done:
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        """Call it on the event loop's thread."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class EngineLoop(ABC):
    """Runs an engine. Only the event loop's thread may call public methods."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.stats = StepStats()  # of the latest step
        self.is_stepping = False  # meanwhile `stats` may still show an idle engine
        self._build = build
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._callbacks: list[Callable[[StepOutput], None]] = []
        self._reports: list[Callable[[StepOutput], None]] = []
        self._stopping = False
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """For attributes and `peek_prefix`. Use `between_steps` for all other calls."""
        assert self._engine is not None, "the engine is not loaded yet"
        return self._engine

    @abstractmethod
    def between_steps(self, call: Callable[[Engine], T], *, light: bool = False) -> asyncio.Future[T]:
        """Run `call(engine)` between two steps or while the engine waits; calls run in order.

        A task that awaits the future at once resumes after callbacks got all earlier outputs, and before they get a later
        one, so tokens stay in order.

        Args:
            light: the call is short and touches no device, so it runs at once if the engine rests. Done-callbacks then
                run after those that get the next output.
        """

    @abstractmethod
    async def start(self) -> None:
        """Build the engine on a thread, and start the loop.

        Raises: what building raises.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Wait for the current step, then refuse calls."""

    def on_output(self, callback: Callable[[StepOutput], None]) -> None:
        """Pass each output to `callback`, even an empty one."""
        self._callbacks.append(callback)

    def report(self, callback: Callable[[StepOutput], None]) -> None:
        """Pass each output to `callback` after REPORT_AFTER_S."""
        self._reports.append(callback)

    async def failed(self) -> BaseException:
        error = await asyncio.shield(self._ended)
        return error or dead(None)

    def _receive(self, output: StepOutput) -> None:
        self.stats = output.stats
        self._deliver(output)

    def _receive_early(self, reserved: Sequence[Exposed]) -> None:
        """Report reservations during a step, without counting tokens twice."""
        stats = msgspec.structs.replace(self.stats, prompt_tokens=0, decode_tokens=0, step_s=0.0)
        self._deliver(StepOutput(reserved=list(reserved), stats=stats))

    def _deliver(self, output: StepOutput) -> None:
        for callback in self._callbacks:
            callback(output)
        if self._reports:
            self._loop.call_later(REPORT_AFTER_S, self._report, output)

    def _report(self, output: StepOutput) -> None:
        for callback in self._reports:
            callback(output)


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)


def resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def fail_call(future: asyncio.Future[Any], error: BaseException | None) -> None:
    """Fail a call because the engine has ended. asyncio logs nothing if the caller does not await it."""
    if not future.done():
        future.set_exception(dead(error))
        future.exception()


def dead(error: BaseException | None) -> InvariantBroken:
    return InvariantBroken(f"the engine is not running: {error or 'it was stopped'}")
