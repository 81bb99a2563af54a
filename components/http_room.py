"""How many connections a server has at once, and which ones are closed when there are more."""

from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from components.http_limits import Closed, Closures

SHED: Final = 16  # of those that may be closed, one in so many is, and one more

T = TypeVar("T")


class Room:
    """The connections of one server: those in a TLS handshake, and those on which requests come."""

    def __init__(self, most: int, closures: Closures) -> None:
        self.connections: Collection[Any] = ()  # on which requests come; uvicorn's own set
        self._handshakes: dict[
            object, Callable[[], object]
        ] = {}  # by what becomes of each, the oldest first; how to end it
        self._most = most
        self._closures = closures

    @property
    def has_handshakes(self) -> bool:
        """Whether some TLS handshake is not over."""
        return bool(self._handshakes)

    def expect(self, connection: object, end: Callable[[], object]) -> None:
        """Count a TLS handshake from which `connection` will come; `end` gives it up."""
        self._handshakes[connection] = end
        self._make_room(connection)

    def forget(self, connection: object) -> None:
        """Count it as a handshake no more."""
        self._handshakes.pop(connection, None)

    def admit(self, connection: object) -> bool:
        """Take in one of `connections`. Returns False when too many are open and none of them can be closed."""
        self.forget(connection)
        return self._make_room(connection)

    def _make_room(self, newcomer: object) -> bool:
        """Close the oldest handshakes first, and then the connections that have been idle for longest."""
        if len(self.connections) + len(self._handshakes) <= self._most:
            return True
        others = [other for other in self._handshakes if other is not newcomer]
        ends = [self._handshakes.pop(other) for other in _share(others)] or _share(self._idle(newcomer))
        for end in ends:
            self._closures.count(Closed.TOO_MANY)
            end()
        return bool(ends)

    def _idle(self, newcomer: object) -> list[Callable[[], object]]:
        """How to close those that no request is under way on, the longest idle first."""
        idle = [other for other in self.connections if other is not newcomer and other.is_idle]
        idle.sort(key=lambda other: float(other.since_s))
        return [other.transport.close for other in idle]


def _share(found: list[T]) -> list[T]:
    return found[: len(found) // SHED + 1]
