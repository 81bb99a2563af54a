"""Build an engine and run it beside asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

from engine.config import FOLLOWER, EngineConfig
from engine.loop.engine_loop import EngineLoop, call_on_loop
from engine.loop.inline_loop import InlineLoop
from engine.loop.threaded_loop import ThreadedLoop
from engine.model.mock_model import is_mock
from engine.model.progress import Progress, silent
from engine.ports import Engine

TORCH: Final = "engine.build"
MOCK: Final = "engine.mock.mock_engine"


def build_engine(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent, follower: str = FOLLOWER
) -> Engine:
    module = import_module(MOCK if is_mock(model) else TORCH)
    engine: Engine = module.build_engine(model, config, state_dir, progress, follower)
    return engine


def has_thread(model: str, config: EngineConfig) -> bool:
    """Return whether the engine has its own thread, because its steps use the CPU."""
    return not is_mock(model) or config.mock.thread


@asynccontextmanager
async def start_engine(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent, follower: str = FOLLOWER
) -> AsyncIterator[EngineLoop]:
    """Load `model` on a thread and run it. `progress` is called on the event loop's thread.

    `follower` is the module of other ranks, which calls `engine.parallel.rank_process.main`.

    Raises: what `build_engine` raises.
    """
    loop = asyncio.get_running_loop()

    def report(task: str, done: int, total: int) -> None:
        call_on_loop(loop, progress, task, done, total)

    def build() -> Engine:
        return build_engine(model, config, state_dir, report, follower)

    async with run_engine(build, thread=has_thread(model, config)) as engine:
        yield engine


@asynccontextmanager
async def run_engine(build: Callable[[], Engine], *, thread: bool = True) -> AsyncIterator[EngineLoop]:
    """Build an engine on a new thread and run it there or, without `thread`, on the event loop."""
    running = ThreadedLoop(build) if thread else InlineLoop(build)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
