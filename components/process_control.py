"""An operator's changes of a running process: log level, trace rate, draining."""

import asyncio
import difflib
import logging
import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from components.errors import Rejected
from components.messaging.call_server import Endpoint
from components.telemetry.figures import Figures
from components.telemetry.spans import tracer
from components.token_bucket import TokenBucket
from components.wire.control import Control, Controlled

log = logging.getLogger(__name__)

SHOWN: Final = 3  # names like an unknown one


class DrainFlag(Protocol):
    draining: bool


class Limit(NamedTuple):
    """The time limit of a drain, and the call that stops the requests which exceed it."""

    after_s: float
    stop_all: Callable[[str], None]


class ProcessControl:
    """Answers `control`. `stopped` returns when an operator ends the process."""

    def __init__(self, figures: Figures, why_no_drain: str = "it has not started yet") -> None:
        """`why_no_drain`: shown until `serves` is called."""
        self._figures = figures
        self._why_no_drain = why_no_drain
        self._stop = asyncio.Event()
        self._is_leaving = False
        self._service: DrainFlag | None = None
        self._limit: Limit | None = None
        self._beat: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    def serves(self, service: DrainFlag, beat: Callable[[], None] = lambda: None, limit: Limit | None = None) -> None:
        """The process may drain without ending. `beat` sends a heartbeat at once. No `limit`: its requests all finish."""
        self._service, self._beat, self._limit = service, beat, limit

    async def stopped(self) -> None:
        await self._stop.wait()

    def leave(self) -> None:
        """The process ends after its requests: an operator can no longer undo that."""
        self._is_leaving = True

    def endpoint(self) -> Endpoint:
        return Endpoint("control", Control, self.control, runs_inline=True)

    async def control(self, wanted: Control) -> Controlled:
        """Change everything or, if a part of `wanted` is invalid, nothing. Raises: Rejected."""
        logger = _logger(wanted.logger)
        rate = wanted.traces_per_s
        if rate is not None and (math.isnan(rate) or rate < 0):
            raise Rejected(f"traces_per_s must be 0 or more, not {rate}", param="traces_per_s")
        service = self._service
        if wanted.work in ("drain", "go-on") and service is None:
            raise Rejected(f"this {self._figures.role} does not drain: {self._why_no_drain}", param="work")
        if wanted.work == "go-on" and (self._is_leaving or self._stop.is_set()):
            raise Rejected(f"this {self._figures.role} is ending: that cannot be undone", param="work")
        if wanted.log_level is not None:
            _set_level(logger, wanted.log_level)
        if rate is not None:
            tracer.limit(TokenBucket(rate))
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

    def _set_draining(self, service: DrainFlag, *, draining: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        service.draining = draining
        self._beat()
        if draining and (limit := self._limit) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limit.after_s, limit.stop_all, "this instance is draining")


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
