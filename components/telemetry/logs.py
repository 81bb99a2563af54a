"""Logs: `getLogger(__name__)`, a constant message, facts in `extra`. Console lines for people, JSON lines for machines.

With the JSON format each line is an object with `ts`, `level`, `logger`, `event` and the facts. Two events are a contract with
whoever supervises the process: `ready`, once, when it serves; `progress` with `task`, `done` and `total`. Equal lines in quick
succession are counted (`repeated_lines.py`).
"""

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Final, Literal

import structlog

from components.telemetry.repeated_lines import CountingHandler, status

PROGRESS_S: Final = 0.5

# Without local variables: they hold prompts.
_TRACEBACKS: Final = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


def configure_logs(level: str, fmt: Literal["console", "json"]) -> None:
    """Send this process's logs, ours and the libraries', to stderr in one format."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=False, key="ts"),
    ]
    renderer: list[structlog.typing.Processor] = (
        [_TRACEBACKS, structlog.processors.JSONRenderer()]
        if fmt == "json"
        else [structlog.dev.ConsoleRenderer(timestamp_key="ts", pad_event_to=28, colors=sys.stderr.isatty())]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    status.setLevel(logging.INFO)
    for noisy in ("httpx", "urllib3", "asyncio", "nats", "uvicorn.access", "uvicorn.error", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_ready(**facts: str) -> None:
    """Say that this process serves."""
    status.info("ready", extra=facts)


class ProgressLog:
    """Says how far a long start-up step is: its begin, its end, and between them twice a second; a supervisor draws the bar."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}

    def __call__(self, task: str, done: int, total: int) -> None:
        """`done` of `total` steps of `task` are over."""
        now = self._clock()
        if 0 < done < total and now - self._told.get(task, -math.inf) < PROGRESS_S:
            return
        self._told[task] = now
        status.info("progress", extra={"task": task, "done": done, "total": total})


log_progress: Final = ProgressLog()
