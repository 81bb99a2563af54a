"""An engine beside asyncio: calls go in, and what its steps give comes back as callbacks, all on the event loop's thread."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from components.errors import InvariantBroken
from engine.ports import Engine, Reserved, StepOutput, StepStats

T = TypeVar("T")

BLOCKED_TICK_S: Final = 0.25  # how often a step is counted while requests wait for pages that others hold


@dataclass(frozen=True, slots=True)
class Call:
    """A function for the engine, and the future that gets what it returns or raises."""

    run: Callable[[Engine], Any]
    future: asyncio.Future[Any]

    def made(self, engine: Engine) -> "Done":
        """Run it."""
        try:
            return Done(self.future, result=self.run(engine))
        except Exception as exc:  # noqa: BLE001 - the request's edge: its caller gets it through the future
            return Done(self.future, error=exc)


@dataclass(frozen=True, slots=True)
class Done:
    """A call that ran."""

    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        """Tell its caller, on the event loop's thread, unless that was cancelled."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class EngineLoop(ABC):
    """One engine, stepped as long as it has work. Everything public here belongs to the event loop's thread."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.stats = StepStats()  # of the latest step
        self._build = build
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._callbacks: list[Callable[[StepOutput], None]] = []
        self._stopping = False
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """For kv_region, max_context and peek_prefix; everything else goes through `post` and `call`."""
        assert self._engine is not None, "the engine is not loaded yet"
        return self._engine

    @abstractmethod
    def post(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Run `call(engine)` while the engine waits or between two steps; what it raises, the future raises.

        Who awaits the future itself resumes before callbacks get the output of a step that came after the call: the
        first token that `deliver` returns is not overtaken by the second.
        """

    @abstractmethod
    def call(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """The same for a `call` that touches no device: it runs at once if the engine rests, and its future is done then.

        Whatever was posted before it has run, and whoever waited for that, or for outputs, has been told. Who awaits the
        future at once resumes before callbacks get the output of the step that follows; a done-callback comes after them.
        """

    @abstractmethod
    async def start(self) -> None:
        """Build the engine, on a thread, and begin. Raises: what building raises."""

    @abstractmethod
    async def stop(self) -> None:
        """Let the current step end, then nothing runs any more and calls are refused."""

    def on_output(self, callback: Callable[[StepOutput], None]) -> None:
        """Have `callback` called with the output of every step from now on, in order, also where it is empty."""
        self._callbacks.append(callback)

    async def failed(self) -> BaseException:
        """Wait until the engine dies of an error, and return it. A dead engine must not look alive."""
        error = await asyncio.shield(self._ended)
        return error or dead(None)

    def _receive(self, output: StepOutput) -> None:
        """One step's output."""
        self.stats = output.stats
        self._hear(output)

    def _receive_early(self, reserved: Sequence[Reserved]) -> None:
        """Requests that got pages while a step was under way; none of its tokens is counted twice."""
        stats = msgspec.structs.replace(self.stats, prompt_tokens=0, decode_tokens=0, step_s=0.0)
        self._hear(StepOutput(reserved=list(reserved), stats=stats))

    def _hear(self, output: StepOutput) -> None:
        for callback in self._callbacks:
            callback(output)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call on the event loop's thread; a loop that was closed while the model loaded has nobody to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)


def resolve(future: asyncio.Future[Any], value: object) -> None:
    """Set a result, unless somebody has given up waiting for it."""
    if not future.done():
        future.set_result(value)


def dead(error: BaseException | None) -> InvariantBroken:
    """What a call to an engine that is over raises."""
    return InvariantBroken(f"the engine is not running: {error or 'it was stopped'}")
