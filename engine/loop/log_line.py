"""The engine's log: one line a second under load, with SGLang's names."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from engine.loop.slow_steps import SlowSteps
from engine.ports import StepOutput

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0


class BatchLog:
    """Sums up steps; pass `stepped` to `EngineLoop.on_output`."""

    def __init__(
        self,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        more: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`more` returns figures of the service. Zeros are left out."""
        self._more = more
        self._page_size = page_size
        self._clock = clock
        self._slow = SlowSteps(clock=clock)
        self._since = clock()  # when the figures below were zero
        self._last = self._since
        self._prompt_tokens = 0
        self._decode_tokens = 0

    def stepped(self, output: StepOutput) -> None:
        now, stats = self._clock(), output.stats
        self._slow.stepped(stats)
        if now - self._last > EVERY_S:  # old figures do not count after an idle time
            self._begin(now - stats.step_s)
        self._last = now
        self._prompt_tokens += stats.prompt_tokens
        self._decode_tokens += stats.decode_tokens
        elapsed_s = now - self._since
        if elapsed_s < EVERY_S:
            return
        if self._prompt_tokens or self._decode_tokens:
            figures = {
                "#running-req": stats.num_running,
                "#token": stats.held_pages * self._page_size,
                "token usage": round(stats.held_pages / max(1, stats.total_pages), 2),
                "gen throughput (token/s)": round(self._decode_tokens / elapsed_s, 1),
                "input throughput (token/s)": round(self._prompt_tokens / elapsed_s, 1),
                "#queue-req": stats.num_waiting,
                "#prealloc-req": stats.num_reserved,
                "#held-req": stats.num_held,
                "#retracted-req": stats.retractions,
                **self._more(),
                "forward": stats.forward,
            }
            log.info("batch", extra={name: figure for name, figure in figures.items() if figure})
        self._begin(now)

    def _begin(self, since: float) -> None:
        self._since = since
        self._prompt_tokens = self._decode_tokens = 0
