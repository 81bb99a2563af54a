"""Profile a running engine."""

import asyncio
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Final

from engine.loop.engine_loop import EngineLoop
from engine.ports import Engine, Recording, StepOutput

# saving one second of an eager model holds the GIL for 0.3 s, and after 2 s of silence a worker is lost
SEGMENT_S: Final = 0.5
SLOW_IMPORT: Final = "torch._inductor"  # its import by torch's profiler takes two seconds


class EngineProfiler:
    def __init__(self, engine: EngineLoop, facts: Mapping[str, str]) -> None:
        self._engine = engine
        self._facts = facts
        self._steps = 0  # with work, since the start
        self._started_s = 0.0
        engine.on_output(self._stepped)

    async def start(self) -> None:
        if "torch" in sys.modules:  # not with the mock engine
            await asyncio.to_thread(import_module, SLOW_IMPORT)
        await self._engine.between_steps(lambda engine: engine.start_profile(self._facts))
        self._started_s = perf_counter()
        self._steps = 0

    async def finish(self, seconds: float, path: Path) -> tuple[float, int]:
        """Record until `seconds` after the start, and append segments to `path` as gzipped Chrome traces.

        Returns: recorded seconds, and steps with work.
        """
        end_s = self._started_s + seconds
        running = True
        try:
            while running:
                await asyncio.sleep(min(SEGMENT_S, end_s - perf_counter()))
                running = perf_counter() < end_s
                recording = await self._engine.between_steps(self._next if running else _stop)
                recorded_s, steps = perf_counter() - self._started_s, self._steps
                await asyncio.to_thread(recording.save, path)
        finally:
            if running:
                await self._engine.between_steps(_stop)
        return recorded_s, steps

    def _next(self, engine: Engine) -> Recording:
        ended = engine.stop_profile()
        engine.start_profile(self._facts)
        return ended

    def _stepped(self, output: StepOutput) -> None:
        if output.stats.prompt_tokens or output.stats.decode_tokens:
            self._steps += 1


def _stop(engine: Engine) -> Recording:
    return engine.stop_profile()
