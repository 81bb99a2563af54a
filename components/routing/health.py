"""Circuit breakers and slow start: which instances may be chosen."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random
from typing import Final

from components.lifecycle import Lifecycle
from components.routing.policy import Member

WARM_S: Final = 10.0
FIRST_SHARE: Final = 0.1  # of an equal share
MAX_CREDIT: Final = 2.0  # requests


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
    first_backoff_s: float = 1.0  # doubled by each failed trial
    max_backoff_s: float = 30.0
    trial_timeout_s: float = 10.0


DEFAULT_SETTINGS: Final = BreakerSettings()


class Trial:
    """A request to an instance whose breaker is half open."""

    __slots__ = ()


class Breaker:
    """After several failures in a row, an instance gets no requests, and later one trial."""

    def __init__(self, name: str, rng: Random, settings: BreakerSettings) -> None:
        self._rng = rng
        self._settings = settings
        self._lifecycle = Lifecycle(f"breaker {name}", NEXT, B.CLOSED)
        self._failures = 0
        self._failed_trials = 0  # in a row
        self._until_s = 0.0  # of the back-off or trial
        self._trial: Trial | None = None

    @property
    def state(self) -> BreakerState:
        return self._lifecycle.state

    @property
    def ready_s(self) -> float:
        """Time from which requests are allowed; 0: always."""
        return 0.0 if self.state is B.CLOSED else self._until_s

    def sent(self, now_s: float) -> Trial | None:
        """Returns: the request's trial, if it is one."""
        if self.state is B.CLOSED or now_s < self._until_s:
            return None
        if self.state is B.OPEN:
            self._lifecycle.advance(B.HALF_OPEN)
        self._until_s = now_s + self._settings.trial_timeout_s
        self._trial = Trial()
        return self._trial

    def succeeded(self) -> bool:
        if self.state is B.OPEN:  # sent before the breaker opened
            return False
        self._failures = self._failed_trials = 0
        if self.state is B.CLOSED:
            return False
        self._lifecycle.advance(B.CLOSED)
        return True

    def undecided(self, trial: Trial, now_s: float) -> None:
        if self.state is B.HALF_OPEN and trial is self._trial:
            self._until_s = min(self._until_s, now_s)

    def failed(self, now_s: float) -> None:
        if self.state is B.OPEN:
            return
        self._failures += 1
        if self.state is B.CLOSED and self._failures < self._settings.failures:
            return
        self._failed_trials += self.state is B.HALF_OPEN
        self._lifecycle.advance(B.OPEN)
        back_off_s = min(
            self._settings.max_backoff_s, self._settings.first_backoff_s * 2.0 ** min(self._failed_trials, 30)
        )
        jitter = 0.5 + 0.5 * self._rng.random()  # routers must not all retry at once
        self._until_s = now_s + back_off_s * jitter


@dataclass(slots=True)
class _Warming:
    since_s: float
    credit: float = 1.0


class Health:
    """Breakers of all instances, and slow start: a new instance is a candidate only with credit, unless all are new.

    Each request of the role adds credit: at first a tenth of an equal share, after WARM_S a full share.
    """

    def __init__(self, rng: Random, settings: BreakerSettings = DEFAULT_SETTINGS) -> None:
        self._rng = rng
        self._settings = settings
        self._known: set[str] = set()
        self._breakers: dict[str, Breaker] = {}
        self._warming: dict[str, _Warming] = {}

    def joined(self, instance_id: str, now_s: float) -> None:
        self.left(instance_id)
        self._known.add(instance_id)
        self._warming[instance_id] = _Warming(now_s)

    def left(self, instance_id: str) -> None:
        self._known.discard(instance_id)
        self._warming.pop(instance_id, None)
        self._breakers.pop(instance_id, None)

    def candidates(self, members: Sequence[Member], now_s: float, *, or_none: bool = False) -> Sequence[Member]:
        """Members that may get a request now. If all breakers are open: all or, with `or_none`, none."""
        if self._breakers:
            ready = [m for m in members if self._ready_s(m.instance_id) <= now_s]
            members = ready if ready or or_none else members
        if not self._warming:
            return members
        self._end_of_warming(now_s)
        warm = [m for m in members if (w := self._warming.get(m.instance_id)) is None or w.credit >= 1]
        if any(m.instance_id not in self._warming for m in warm):
            return warm
        return members

    def state(self, instance_id: str) -> BreakerState:
        breaker = self._breakers.get(instance_id)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def states(self) -> dict[str, BreakerState]:
        return {instance_id: self.state(instance_id) for instance_id in self._known}

    def sent(self, instance_id: str, now_s: float) -> Trial | None:
        """Returns: what to pass to `undecided`, if this request is a trial."""
        breaker = self._breakers.get(instance_id)
        trial = None if breaker is None else breaker.sent(now_s)
        if self._warming:
            self._give_credit(now_s)
            if (warming := self._warming.get(instance_id)) is not None:
                warming.credit = max(warming.credit - 1, 0.0)
        return trial

    def succeeded(self, instance_id: str, now_s: float) -> None:
        breaker = self._breakers.get(instance_id)
        if breaker is None:
            return
        if breaker.succeeded():
            self._warming[instance_id] = _Warming(now_s)
        if breaker.state is BreakerState.CLOSED:
            del self._breakers[instance_id]

    def undecided(self, instance_id: str, trial: Trial, now_s: float) -> None:
        """A trial was refused or cancelled: another request may replace it."""
        if (breaker := self._breakers.get(instance_id)) is not None:
            breaker.undecided(trial, now_s)

    def failed(self, instance_id: str, now_s: float) -> None:
        if instance_id not in self._known:
            return
        if instance_id not in self._breakers:
            self._breakers[instance_id] = Breaker(instance_id, self._rng, self._settings)
        self._breakers[instance_id].failed(now_s)

    def _ready_s(self, instance_id: str) -> float:
        breaker = self._breakers.get(instance_id)
        return 0.0 if breaker is None else breaker.ready_s

    def _end_of_warming(self, now_s: float) -> None:
        over = [i for i, w in self._warming.items() if now_s - w.since_s >= WARM_S]
        for instance_id in over:
            del self._warming[instance_id]

    def _give_credit(self, now_s: float) -> None:
        each = 1 / max(len(self._known), 1)
        for warming in self._warming.values():
            share = min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * (now_s - warming.since_s) / WARM_S)
            warming.credit = min(warming.credit + share * each, MAX_CREDIT)
