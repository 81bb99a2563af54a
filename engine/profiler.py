"""Profiling an engine that runs: from the event loop, between two steps of its thread."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Final

from engine.loop import EngineLoop
from engine.ports import Recording, StepOutput

# Collecting and writing events holds the interpreter, 3 µs and 2 µs for each of some 2,000 in a step. A worker that is
# silent for 2 s is lost to everyone, so a profile ends early.
MAX_STEPS: Final = 200


class EngineProfiler:
    """Profiles one engine; who calls sees to it that one profile ends before the next begins."""

    def __init__(self, engine: EngineLoop, facts: Mapping[str, str]) -> None:
        """`facts` stand in every trace."""
        self._engine = engine
        self._facts = facts
        self._steps = 0  # that computed something, since the latest start
        self._started_s = 0.0
        self._enough = asyncio.Event()
        engine.on_output(self._stepped)

    async def start(self) -> None:
        """Begin. Raises: Rejected, when this engine has nothing to profile."""
        await self._engine.post(lambda engine: engine.start_profile(self._facts))
        self._started_s = perf_counter()
        self._steps = 0
        self._enough.clear()

    async def finish(self, seconds: float, path: Path) -> tuple[float, int]:
        """Stop after `seconds` or MAX_STEPS steps and write the trace to `path`.

        Returns: seconds that were recorded, and steps in them that computed something. Cancelled, it stops at once.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._enough.wait()
        except TimeoutError:
            pass
        finally:
            recorded_s, steps = perf_counter() - self._started_s, self._steps
            recording: Recording = await self._engine.post(lambda engine: engine.stop_profile())
        await asyncio.to_thread(recording.save, path)
        return recorded_s, steps

    def _stepped(self, output: StepOutput) -> None:
        if output.stats.prompt_tokens or output.stats.decode_tokens:
            self._steps += 1
            if self._steps >= MAX_STEPS:
                self._enough.set()
