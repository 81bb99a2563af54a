"""A breaker for one instance: after failures in a row nothing goes there for a while, then one request tries."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random
from typing import Final

from components.lifecycle import Lifecycle


class BreakerState(StrEnum):
    """Whether requests go to an instance."""

    CLOSED = auto()  # they do
    OPEN = auto()  # none, until the back-off is over
    HALF_OPEN = auto()  # one is on its way to try


B = BreakerState
NEXT: Final[dict[BreakerState, Set[BreakerState]]] = {
    B.CLOSED: {B.OPEN},
    B.OPEN: {B.HALF_OPEN},
    B.HALF_OPEN: {B.CLOSED, B.OPEN},
}


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long."""

    failures: int = 3  # in a row
    first_s: float = 1.0  # back-off after the first opening, doubled by each failed try
    most_s: float = 30.0
    try_s: float = 10.0  # a try of which nothing was heard for so long has failed to tell: another may go


USUAL: Final = BreakerSettings()


class Breaker:
    """Of one instance in one epoch. A failure is what speaks against the instance: lost, silent, broken; not a refusal."""

    def __init__(self, name: str, rng: Random, settings: BreakerSettings) -> None:
        self._rng = rng
        self._settings = settings
        self._lifecycle = Lifecycle(f"breaker {name}", NEXT, B.CLOSED)
        self._failures = 0  # in a row
        self._tries = 0  # that failed, in a row
        self._until_s = 0.0  # open: end of the back-off; half open: end of waiting for the try

    @property
    def state(self) -> BreakerState:
        """As of the last event: a back-off that is over shows in `ready_s`."""
        return self._lifecycle.state

    @property
    def ready_s(self) -> float:
        """From when on a request may go there; 0: any time."""
        return 0.0 if self.state is B.CLOSED else self._until_s

    def sent(self, now_s: float) -> None:
        """A request goes there: while the breaker is not closed, it is the one that tries."""
        if self.state is B.CLOSED or now_s < self._until_s:
            return
        if self.state is B.OPEN:
            self._lifecycle.advance(B.HALF_OPEN)
        self._until_s = now_s + self._settings.try_s

    def succeeded(self) -> bool:
        """A request came back well. Returns: whether the breaker closed by it."""
        if self.state is B.OPEN:  # one from before
            return False
        self._failures = self._tries = 0
        if self.state is B.CLOSED:
            return False
        self._lifecycle.advance(B.CLOSED)
        return True

    def undecided(self, now_s: float) -> None:
        """A request ended without a word for or against the instance: if it was the one that tried, another may."""
        if self.state is B.HALF_OPEN:
            self._until_s = min(self._until_s, now_s)

    def failed(self, now_s: float) -> None:
        """A request failed there."""
        if self.state is B.OPEN:  # one from before
            return
        self._failures += 1
        if self.state is B.CLOSED and self._failures < self._settings.failures:
            return
        self._tries += self.state is B.HALF_OPEN
        self._lifecycle.advance(B.OPEN)
        back_off_s = min(self._settings.most_s, self._settings.first_s * 2.0 ** min(self._tries, 30))
        self._until_s = now_s + back_off_s * (0.5 + 0.5 * self._rng.random())  # or all routers would try at once
