"""Whether decode instances subscribe to prefill instances or query them, and how often each instance sends. No I/O.

If every decode instance followed every prefill instance, deliveries would grow with the product of their numbers. So in a large
fleet decode asks a few prefill instances about each prompt. Frontends follow all decode instances, which send less often as the
fleet grows.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from components.discovery.book import InstanceBook
from components.wire.heartbeat import USUAL_NEXT_S
from components.wire.instances import InstanceRecord, Role

ALL_PAIRS: Final = 4096  # pairs up to which decode instances follow prefill instances: 64 of each
RESUBSCRIBE_BELOW: Final = 0.75  # of ALL_PAIRS: hysteresis
PLANNERS: Final = 1  # they subscribe to all heartbeats
# deliveries a second, for each kind of message
DELIVERIES_PER_S: Final = 12_000
QUERIES_PER_S: Final = 11_000  # of all decode instances; each costs two deliveries
RECEIVED_PER_S: Final = 2_000  # heartbeats of one role, by one process
MIN_INTERVAL_S: Final = 0.05  # between an instance's messages
MAX_INTERVAL_S: Final = 5.0  # enough for 60,000 pairs of decode and frontend

ROLES: Final[tuple[Role, ...]] = ("frontend", "decode", "prefill")


def heartbeat_rest_s(instances: int, followings: int) -> float:
    received = instances * DELIVERIES_PER_S / RECEIVED_PER_S
    return _rest_s(max(followings + PLANNERS * instances, received))


def kv_events_rest_s(followings: int) -> float:
    return _rest_s(followings)


def queries_per_s(decodes: int) -> float:
    """Each decode instance's limit."""
    return QUERIES_PER_S / max(decodes, 1)


def _rest_s(deliveries: float) -> float:
    return min(max(MIN_INTERVAL_S, deliveries / DELIVERIES_PER_S), MAX_INTERVAL_S)


class FleetSizes:
    def __init__(self, book: InstanceBook) -> None:
        self._counts: Counter[Role] = Counter()
        for role in ROLES:
            book.follow(role, self._changed)

    def count(self, role: Role) -> int:
        return self._counts[role]

    @property
    def pairs(self) -> int:
        """Pairs of decode and prefill; subscriptions do not depend on the model."""
        return self._counts["decode"] * self._counts["prefill"]

    def followings(self, role: Role) -> int:
        """Pairs of a worker of `role` and a process that routes to it."""
        if role == "prefill":
            return self.pairs if self.pairs <= ALL_PAIRS else 0
        return self._counts["decode"] * self._counts["frontend"]

    def heartbeat_rest_s(self, role: Role) -> float:
        rest_s = heartbeat_rest_s(self.count(role), self.followings(role))
        if role == "prefill" and self.pairs > ALL_PAIRS:  # only planners follow them
            return max(USUAL_NEXT_S, rest_s)
        return rest_s

    def kv_events_rest_s(self, role: Role) -> float:
        if role == "prefill" and self.pairs > ALL_PAIRS:
            return MAX_INTERVAL_S  # no process follows them
        return kv_events_rest_s(self.followings(role))

    def queries_per_s(self) -> float:
        return queries_per_s(self._counts["decode"])

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is not None:
            self._counts[was.role] -= 1
        if now is not None:
            self._counts[now.role] += 1


class SubscriptionChoice:
    def __init__(self, book: InstanceBook, most_pairs: int | None = None) -> None:
        self.followed = InstanceBook()  # all prefill instances, or none
        self.sizes = FleetSizes(book)
        self._most_pairs = ALL_PAIRS if most_pairs is None else most_pairs
        self.queries_instances = self.sizes.pairs > self._most_pairs
        self._book = book
        self._on_change: list[Callable[[], None]] = []
        self._fill()
        book.subscribe(self._changed)

    def on_change(self, callback: Callable[[], None]) -> None:
        self._on_change.append(callback)

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        queries_instances = self.sizes.pairs > self._most_pairs * (RESUBSCRIBE_BELOW if self.queries_instances else 1)
        if queries_instances != self.queries_instances:
            self.queries_instances = queries_instances
            self._fill()
            for callback in self._on_change:
                callback()
        elif not queries_instances:
            if was is not None and was.role == "prefill" and now is None:
                self.followed.remove(was.instance_id)
            if now is not None and now.role == "prefill":
                self.followed.put(now.instance_id, now)

    def _fill(self) -> None:
        followed = () if self.queries_instances else self._book.of_role("prefill")
        self.followed.replace_all({record.instance_id: record for record in followed})
