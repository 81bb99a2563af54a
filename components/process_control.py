"""Changes of a running process by an operator: log level, trace rate, draining."""

import asyncio
import difflib
import logging
import math
from collections.abc import Callable
from typing import Final

from components.errors import Rejected
from components.messaging.call_server import Endpoint
from components.process import Draining
from components.telemetry.figures import Figures
from components.telemetry.spans import TraceRate, tracer
from components.wire.control import Control, Controlled

log = logging.getLogger(__name__)

SHOWN: Final = 3  # names like an unknown one


class ProcessControl:
    """Answers `control`. `stopped` returns when an operator wants the process to end."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._stop = asyncio.Event()
        self._service: Draining | None = None
        self._drain_timeout_s = 0.0
        self._beat: Callable[[], None] = lambda: None
        self._limit: asyncio.TimerHandle | None = None

    def serves(self, service: Draining, drain_timeout_s: float, beat: Callable[[], None]) -> None:
        """The process may drain without ending. `beat` sends a heartbeat at once."""
        self._service, self._drain_timeout_s, self._beat = service, drain_timeout_s, beat

    async def stopped(self) -> None:
        await self._stop.wait()

    def endpoint(self) -> Endpoint:
        return Endpoint("control", Control, self.control, immediate=True)

    async def control(self, wanted: Control) -> Controlled:
        """Change everything or, if a part of `wanted` is invalid, nothing. Raises: Rejected."""
        logger = _logger(wanted.logger)
        rate = wanted.traces_per_s
        if rate is not None and (math.isnan(rate) or rate < 0):
            raise Rejected(f"traces_per_s must be 0 or more, not {rate}", param="traces_per_s")
        service = self._service
        if wanted.work in ("drain", "go-on") and service is None:
            raise Rejected(
                f"a {self._figures.role} instance does not drain, only prefill and decode do; with --stop it finishes its "
                "requests and ends",
                param="work",
            )
        if wanted.log_level is not None:
            _set_level(logger, wanted.log_level)
        if rate is not None:
            tracer.limit(TraceRate(rate))
            self._figures.traces_per_s = rate
        if wanted.work == "stop":
            self._stop.set()
        elif wanted.work is not None and service is not None:
            self._set_draining(service, draining=wanted.work == "drain")
        facts = {"log_level": wanted.log_level, "of": wanted.logger, "traces_per_s": rate, "work": wanted.work}
        log.warning("changed by an operator", extra={k: v for k, v in facts.items() if v not in (None, "")})
        return Controlled(
            log_level=logging.getLevelName(logger.getEffectiveLevel()).lower(),
            traces_per_s=self._figures.traces_per_s,
            draining=self._figures.is_draining() or self._stop.is_set(),
        )

    def _set_draining(self, service: Draining, *, draining: bool) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        service.draining = draining
        self._beat()
        if draining:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(self._drain_timeout_s, service.stop_all, "this instance is draining")


def _logger(name: str) -> logging.Logger:
    """Raises: Rejected, if no module of this process has such a logger."""
    known = [one for one in logging.root.manager.loggerDict if one]
    if not name or name in known:
        return logging.getLogger(name or None)
    near = difflib.get_close_matches(name, known, n=SHOWN) or [one for one in known if name in one][:SHOWN]
    hint = f"did you mean {' or '.join(near)}?" if near else "loggers have the names of modules"
    raise Rejected(f"this process has no logger {name[:64]!r}: {hint}", param="logger")


def _set_level(logger: logging.Logger, level: str) -> None:
    if level != "default":
        logger.setLevel(level.upper())
    elif logger is logging.root:
        raise Rejected("'default' is for a logger that is named", param="log_level")
    else:
        logger.setLevel(logging.NOTSET)
