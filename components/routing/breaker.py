"""A circuit breaker: after failures in a row, an instance gets no requests, then one on trial."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random
from typing import Final

from components.lifecycle import Lifecycle


class BreakerState(StrEnum):
    CLOSED = auto()
    OPEN = auto()  # until the back-off ends
    HALF_OPEN = auto()


B = BreakerState
NEXT: Final[dict[BreakerState, Set[BreakerState]]] = {
    B.CLOSED: {B.OPEN},
    B.OPEN: {B.HALF_OPEN},
    B.HALF_OPEN: {B.CLOSED, B.OPEN},
}


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    failures: int = 3  # in a row
    first_s: float = 1.0  # back-off, doubled by each failed trial
    most_s: float = 30.0
    try_s: float = 10.0  # limit of a trial


USUAL: Final = BreakerSettings()


class Breaker:
    def __init__(self, name: str, rng: Random, settings: BreakerSettings) -> None:
        self._rng = rng
        self._settings = settings
        self._lifecycle = Lifecycle(f"breaker {name}", NEXT, B.CLOSED)
        self._failures = 0
        self._tries = 0  # failed trials in a row
        self._until_s = 0.0  # end of the back-off or trial

    @property
    def state(self) -> BreakerState:
        return self._lifecycle.state

    @property
    def ready_s(self) -> float:
        """Requests may pass from this time on; 0: any time."""
        return 0.0 if self.state is B.CLOSED else self._until_s

    def sent(self, now_s: float) -> None:
        if self.state is B.CLOSED or now_s < self._until_s:
            return
        if self.state is B.OPEN:
            self._lifecycle.advance(B.HALF_OPEN)
        self._until_s = now_s + self._settings.try_s

    def succeeded(self) -> bool:
        if self.state is B.OPEN:  # a request from before
            return False
        self._failures = self._tries = 0
        if self.state is B.CLOSED:
            return False
        self._lifecycle.advance(B.CLOSED)
        return True

    def undecided(self, now_s: float) -> None:
        if self.state is B.HALF_OPEN:
            self._until_s = min(self._until_s, now_s)

    def failed(self, now_s: float) -> None:
        if self.state is B.OPEN:
            return
        self._failures += 1
        if self.state is B.CLOSED and self._failures < self._settings.failures:
            return
        self._tries += self.state is B.HALF_OPEN
        self._lifecycle.advance(B.OPEN)
        back_off_s = min(self._settings.most_s, self._settings.first_s * 2.0 ** min(self._tries, 30))
        jitter = 0.5 + 0.5 * self._rng.random()  # or all routers would try at once
        self._until_s = now_s + back_off_s * jitter
