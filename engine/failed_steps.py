"""Recognise an engine that cannot compute any more, by the steps that failed since the last one that landed."""

import logging
from collections.abc import Iterable
from typing import Final

from components.errors import InvariantBroken
from engine.scheduler.request import Request

log = logging.getLogger(__name__)

MOST: Final = 5  # failed steps in a row, each with a prompt that the earlier ones did not have


class EngineBroken(InvariantBroken):
    """Several steps in a row failed and none landed: the engine ends, and its process with it."""


class FailedSteps:
    """Counts failed steps until one lands.

    A step counts only if it has a prompt that no earlier one of them had. So a request that fails every step it is in
    does not end the process, however often its client sends it again.
    """

    def __init__(self) -> None:
        self._prompts: set[int] = set()  # hashes of those that failed
        self._count = 0
        self._cause = ""

    def failed(self, requests: Iterable[Request], cause: str) -> None:
        """A step with these requests failed."""
        prompts = {hash(tuple(r.tokens[: r.prompt_len])) for r in requests}
        self._count += not prompts <= self._prompts
        self._prompts |= prompts
        self._cause = cause

    def landed(self) -> None:
        """A step landed."""
        if self._prompts:
            self._prompts.clear()
            self._count = 0

    def check(self) -> None:
        """Raises: EngineBroken, when there were too many."""
        if self._count >= MOST:
            log.critical("every step fails: the engine ends", extra={"steps": self._count, "cause": self._cause})
            raise EngineBroken(f"{self._count} steps in a row failed, the last one with: {self._cause}")
