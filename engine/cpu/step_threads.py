"""Sets each step's CPU threads: as many as `ThreadLimit` allows, if other workers leave the cores."""

import torch

from engine.cpu.shared_cores import LOOK_S, SharedCores
from engine.cpu.thread_limit import ThreadLimit


class StepThreads:
    """Use it on the computing thread."""

    def __init__(self, limit: ThreadLimit, cores: SharedCores | None = None) -> None:
        self._limit = limit
        self._cores = cores

    def wait_s(self, *, prompts: bool) -> float:
        """Get cores for a step that begins now. Returns 0, or the seconds until the next attempt."""
        threads = self._limit.of_step(prompts=prompts)
        if self._cores is not None:
            threads = self._cores.ask(prompts=prompts, most=threads)
            if not threads:
                return LOOK_S
        torch.set_num_threads(threads)  # always, as earlier steps may have set OpenMP's threads but not MKL's
        self._limit.begin(threads)
        return 0

    def done(self) -> None:
        if self._cores is not None:
            self._cores.done()
        self._limit.end()

    def rest(self) -> None:
        if self._cores is not None:
            self._cores.rest()
