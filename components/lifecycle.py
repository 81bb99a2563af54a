"""A lifecycle: an enum and a table of legal moves."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Generic, TypeVar

from components.errors import IllegalTransition

S = TypeVar("S", bound=StrEnum)

log = logging.getLogger(__name__)


class Tally(Generic[S]):
    """How many are in each state that is not terminal."""

    __slots__ = ("_counts", "_table")

    def __init__(self, table: Mapping[S, Set[S]]) -> None:
        self._table = table
        self._counts: Counter[S] = Counter()

    @property
    def states(self) -> list[S]:
        return list(self._table)

    def __getitem__(self, state: S) -> int:
        return self._counts[state]

    def moved(self, was: S | None, now: S) -> None:
        """`was`: None for a new thing."""
        if was is not None:
            self._counts[was] -= 1
        if now in self._table:
            self._counts[now] += 1


class Lifecycle(Generic[S]):
    """States without a row in `table` are terminal."""

    __slots__ = ("_name", "_table", "_tally", "entered_s", "state")

    def __init__(self, name: str, table: Mapping[S, Set[S]], start: S, tally: Tally[S] | None = None) -> None:
        self._name = name
        self._table = table
        self.state = start  # only `advance` writes it; no property: engines read it for each token
        self.entered_s = time.monotonic()  # the present state
        self._tally = tally
        if tally is not None:
            tally.moved(None, start)

    @property
    def is_over(self) -> bool:
        return self.state not in self._table

    def advance(self, to: S) -> None:
        if to not in self._table.get(self.state, frozenset()):
            raise IllegalTransition(f"{self._name}: {self.state} → {to} is not in the table")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("state", extra={"of": self._name, "was": str(self.state), "is": str(to)})
        if self._tally is not None:
            self._tally.moved(self.state, to)
        self.state = to
        self.entered_s = time.monotonic()
