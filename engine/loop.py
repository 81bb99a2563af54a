"""The engine beside asyncio: calls go in, step outputs come back as callbacks on the event loop's thread."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from components.errors import InvariantBroken
from engine.ports import Engine, Reserved, StepOutput, StepStats

T = TypeVar("T")

BLOCKED_TICK_S: Final = 0.25  # interval of steps while requests wait for pages


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
        """Complete its future, on the event loop's thread, unless it was cancelled."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class EngineLoop(ABC):
    """One engine, stepped while it has work. Public methods belong to the event loop's thread."""

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
        """Run `call(engine)` while the engine waits or between two steps; the future gets what it raises.

        Whoever awaits the future resumes before callbacks get a later step's output: the first token from `deliver`
        is not overtaken by the second.
        """

    @abstractmethod
    def call(self, call: Callable[[Engine], T]) -> asyncio.Future[T]:
        """As `post`, for a `call` that touches no device: it runs at once if the engine rests, and its future is
        done then.

        Earlier calls have run and been reported by then. Whoever awaits the future at once resumes before callbacks
        get the next step's output; done-callbacks run after them.
        """

    @abstractmethod
    async def start(self) -> None:
        """Build the engine on a thread and begin. Raises: what building raises."""

    @abstractmethod
    async def stop(self) -> None:
        """Let the current step end; later calls are refused."""

    def on_output(self, callback: Callable[[StepOutput], None]) -> None:
        """Call `callback` with every step's output, in order, also empty ones."""
        self._callbacks.append(callback)

    async def failed(self) -> BaseException:
        """Wait until the engine dies of an error, and return it: a dead engine must not look alive."""
        error = await asyncio.shield(self._ended)
        return error or dead(None)

    def _receive(self, output: StepOutput) -> None:
        self.stats = output.stats
        self._hear(output)

    def _receive_early(self, reserved: Sequence[Reserved]) -> None:
        """Requests that got pages during a step; its tokens are not counted twice."""
        stats = msgspec.structs.replace(self.stats, prompt_tokens=0, decode_tokens=0, step_s=0.0)
        self._hear(StepOutput(reserved=list(reserved), stats=stats))

    def _hear(self, output: StepOutput) -> None:
        for callback in self._callbacks:
            callback(output)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call on the event loop's thread; a closed loop is ignored."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)


def resolve(future: asyncio.Future[Any], value: object) -> None:
    """Unless the future is done or cancelled."""
    if not future.done():
        future.set_result(value)


def dead(error: BaseException | None) -> InvariantBroken:
    return InvariantBroken(f"the engine is not running: {error or 'it was stopped'}")
