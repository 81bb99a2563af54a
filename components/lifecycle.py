"""A lifecycle is an enum and a table of legal moves; one method writes the state."""

import logging
from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Generic, TypeVar

from components.errors import IllegalTransition

S = TypeVar("S", bound=StrEnum)

log = logging.getLogger(__name__)


class Lifecycle(Generic[S]):
    """The state of one thing. A state without a row in `table` is terminal."""

    __slots__ = ("_name", "_state", "_table")

    def __init__(self, name: str, table: Mapping[S, Set[S]], start: S) -> None:
        self._name = name
        self._table = table
        self._state = start

    @property
    def state(self) -> S:
        """Where it is now."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether the state is terminal."""
        return self._state not in self._table

    def advance(self, to: S) -> None:
        """Move to `to`. Raises: IllegalTransition, off the table."""
        if to not in self._table.get(self._state, frozenset()):
            raise IllegalTransition(f"{self._name}: {self._state} → {to} is not in the table")
        log.debug("state", extra={"of": self._name, "was": str(self._state), "is": str(to)})
        self._state = to
