"""Logging: console lines for people or JSON lines for programs.

A JSON line has `ts`, `level`, `logger`, `event` and the facts. Supervisors need the events `ready`, and `progress` with `task`,
`done` and `total`.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final, Literal

import structlog
from opentelemetry import trace

from components.telemetry.repeated_lines import CountingHandler, status

request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")  # inherited by tasks and timers


class RequestIds(logging.Filter):
    """Adds the ids of the task's request: `request_id`, and `trace_id` if it is traced. A line's own facts win.

    It is a filter because filters run in the task that logs. Another thread writes a line that is held back.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        facts = record.__dict__
        if "request_id" not in facts and (name := request_id.get()):
            facts["request_id"] = name
        if "trace_id" not in facts:
            span = trace.get_current_span().get_span_context()
            if span.is_valid:
                facts["trace_id"] = trace.format_trace_id(span.trace_id)
        return True


PROGRESS_S: Final = 0.5
COLOURS: Final = {"warning": 33, "error": 31, "critical": 31}

# local variables may contain prompts
_TRACEBACKS: Final = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


def configure_logs(level: str, fmt: Literal["console", "json"]) -> None:
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=False, key="ts"),
    ]
    renderer: list[structlog.typing.Processor] = (
        [_TRACEBACKS, structlog.processors.JSONRenderer()]
        if fmt == "json"
        else [structlog.processors.format_exc_info, PlainLines(colours=sys.stderr.isatty())]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(RequestIds())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    status.setLevel(logging.INFO)
    for noisy in ("httpx", "urllib3", "asyncio", "nats", "uvicorn.access", "uvicorn.error", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns without CUDA


class PlainLines:
    """Formats a line as time of day, event and facts, for `services.local`."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours

    def __call__(self, _logger: object, _method: str, facts: MutableMapping[str, Any]) -> str:
        level, event, ts = (printable(str(facts.pop(name, ""))) for name in ("level", "event", "ts"))
        facts.pop("logger", None)
        exception = facts.pop("exception", None)
        shown = "".join(
            f"  {name}={printable(value) if isinstance(value, str) else json.dumps(value, default=str)}"
            for name, value in facts.items()
            if name != "color_message"
        )
        if not self._colours:
            event = with_level(level, event)
        elif level in COLOURS:
            event = f"\033[{COLOURS[level]}m{event}\033[0m"
        return f"{ts[11:19]}  {event}{shown}" + (f"\n{printable_lines(exception)}" if exception else "")


def with_level(level: str, event: str) -> str:
    """Put the level, if it is warning or higher, before the event."""
    return f"{level}: {event}" if level in COLOURS else event


def printable(text: str) -> str:
    """Escape unprintable characters: a newline in a client's data would forge a line."""
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() else each.encode("unicode_escape").decode() for each in text])


def printable_lines(text: str) -> str:
    """Escape as `printable`, but keep newlines."""
    return "\n".join(map(printable, text.split("\n")))


def log_ready(**facts: str) -> None:
    status.info("ready", extra=facts)


class ProgressLog:
    """Logs progress of a long start-up step: at its start, at its end and twice a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_s: dict[str, float] = {}

    def __call__(self, task: str, done: int, total: int) -> None:
        now = self._clock()
        if 0 < done < total and now - self._shown_s.get(task, -math.inf) < PROGRESS_S:
            return
        self._shown_s[task] = now
        status.info("progress", extra={"task": task, "done": done, "total": total})


log_progress: Final = ProgressLog()
