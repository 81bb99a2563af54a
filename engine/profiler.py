"""Profiling an engine that runs: from the event loop, between two steps of its thread."""

import asyncio
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Final

from engine.loop import EngineLoop
from engine.ports import Engine, Recording, StepOutput

# Collecting and writing events holds the interpreter, for some 5 µs each, and an eager model makes 60,000 a second. A
# worker that is silent for 2 s is lost to everyone, so a profile is collected a piece at a time.
SEGMENT_S: Final = 0.5
SLOW_IMPORT: Final = "torch._inductor"  # by torch's profiler, at its first start: two seconds without a step


class EngineProfiler:
    """Profiles one engine; who calls sees to it that one profile ends before the next begins."""

    def __init__(self, engine: EngineLoop, facts: Mapping[str, str]) -> None:
        """`facts` stand in every trace."""
        self._engine = engine
        self._facts = facts
        self._steps = 0  # that computed something, since the latest start
        self._started_s = 0.0
        engine.on_output(self._stepped)

    async def start(self) -> None:
        """Begin. Raises: Rejected, when this engine has nothing to profile."""
        if "torch" in sys.modules:  # not with the mock engine
            await asyncio.to_thread(import_module, SLOW_IMPORT)
        await self._engine.post(self._start)
        self._started_s = perf_counter()
        self._steps = 0

    async def finish(self, seconds: float, path: Path) -> tuple[float, int]:
        """Go on for `seconds`, then stop; a gzipped Chrome trace of each segment is appended to `path`.

        Returns: seconds that were recorded, and steps in them that computed something. Cancelled, it stops at once.
        """
        end_s = self._started_s + seconds
        running = True
        try:
            while running:
                await asyncio.sleep(min(SEGMENT_S, end_s - perf_counter()))
                running = perf_counter() < end_s
                recording = await self._engine.post(self._next if running else _stop)
                recorded_s, steps = perf_counter() - self._started_s, self._steps
                await asyncio.to_thread(recording.save, path)
        finally:
            if running:
                await self._engine.post(_stop)
        return recorded_s, steps

    def _start(self, engine: Engine) -> None:
        engine.start_profile(self._facts)

    def _next(self, engine: Engine) -> Recording:
        ended = engine.stop_profile()
        engine.start_profile(self._facts)
        return ended

    def _stepped(self, output: StepOutput) -> None:
        if output.stats.prompt_tokens or output.stats.decode_tokens:
            self._steps += 1


def _stop(engine: Engine) -> Recording:
    return engine.stop_profile()
