"""Detect an engine that cannot compute any more."""

import logging
from collections.abc import Iterable
from typing import Final

from components.errors import InvariantBroken
from engine.scheduler.request import Request

log = logging.getLogger(__name__)

MOST: Final = 5  # failed steps in a row


class EngineBroken(InvariantBroken):
    pass


class FailedSteps:
    """Counts failed steps with a new prompt, so that retries of one request cannot end the process."""

    def __init__(self) -> None:
        self._prompts: set[int] = set()  # hashes
        self._count = 0
        self._cause = ""

    def failed(self, requests: Iterable[Request], cause: str) -> None:
        prompts = {hash(tuple(r.tokens[: r.prompt_len])) for r in requests}
        self._count += not prompts <= self._prompts
        self._prompts |= prompts
        self._cause = cause

    def landed(self) -> None:
        if self._prompts:
            self._prompts.clear()
            self._count = 0

    def check(self) -> None:
        if self._count >= MOST:
            log.critical("every step fails: the engine ends", extra={"steps": self._count, "cause": self._cause})
            raise EngineBroken(f"{self._count} steps in a row failed, the last one with: {self._cause}")
