"""How many instances follow each other, and how often each may send, so that all deliveries together stay within a budget.

One message costs NATS one delivery for each instance that follows its sender. If every decode instance followed every prefill
instance, deliveries would grow with the product of both. So a decode instance of a large fleet follows a share of the prefill
instances, and senders send less often the more deliveries one round of messages makes. No I/O.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest
from typing import Final, TypeVar

from components.discovery.book import InstanceBook
from components.routing.choice import Identified
from components.routing.hashing import Rendezvous
from components.wire.instances import InstanceRecord, Role

FOLLOWED: Final = (
    16  # prefill instances that a decode instance follows, and decode instances that follow a prefill, at least
)
ALL_PAIRS: Final = 4096  # followings up to which a decode instance follows every prefill instance: 64 of each
WATCHERS: Final = 1  # a planner follows the heartbeats of all workers
# Deliveries a second of one kind of message: heartbeats of decode, of prefill, KV events of decode, of prefill. 48,000 in all.
DELIVERIES_PER_S: Final = 12_000
HEARD_PER_S: Final = 2_000  # heartbeats of one role that one process receives
SOONEST_S: Final = 0.05  # from one message of an instance to its next, at least
LONGEST_S: Final = 5.0  # and at most: the budget holds up to 60,000 followings of one kind
LINGER_S: Final = 120.0  # a transfer from an instance that is no longer followed is over by then

# Factor on what a token cached at a decode instance is worth to a frontend, where decode instances follow only some of the
# prefill instances: one that the instance follows has this token cached, too; for another decode instance it is computed again.
PARTIAL_CACHE_WORTH: Final = 16.0

Instance = TypeVar("Instance", bound=Identified)

ROLES: Final[tuple[Role, ...]] = ("frontend", "decode", "prefill")


def num_followed(prefills: int, decodes: int) -> int:
    """Of `prefills` instances, how many each of `decodes` instances follows.

    All of them in a small fleet. Else so many that each decode instance has a choice of FOLLOWED, and that each prefill
    instance is followed by FOLLOWED on average.
    """
    pairs = max(ALL_PAIRS, FOLLOWED * prefills, FOLLOWED * decodes)
    return min(prefills, -(-pairs // max(decodes, 1)))


def followed(me: str, prefills: Sequence[Instance], count: int) -> Sequence[Instance]:
    """The `count` of `prefills` that the decode instance `me` follows: those with its highest scores (rendezvous hashing).

    An instance that leaves is replaced at its own followers alone; one that joins replaces one instance at each of its own.
    """
    if count >= len(prefills):
        return prefills
    scores = Rendezvous().scores(me.encode(), prefills)
    return [prefills[at] for at in nlargest(count, range(len(prefills)), key=scores.__getitem__)]


def heartbeat_rest_s(instances: int, followings: int) -> float:
    """Seconds from a heartbeat to the next, at least, of each of `instances` workers that have so many `followings` in all."""
    heard = instances * DELIVERIES_PER_S / HEARD_PER_S
    return _rest_s(max(followings + WATCHERS * instances, heard))


def kv_events_rest_s(followings: int) -> float:
    """Seconds from a batch of KV events to the next, at least, of workers that have so many `followings` in all."""
    return _rest_s(followings)


def _rest_s(deliveries: float) -> float:
    return min(max(SOONEST_S, deliveries / DELIVERIES_PER_S), LONGEST_S)


class FleetSizes:
    """How many instances of each role serve each model; it follows a book."""

    def __init__(self, book: InstanceBook) -> None:
        self._counts: Counter[tuple[Role, str | None]] = Counter()
        for role in ROLES:
            for record in book.of_role(role):
                self._changed(None, record)
        book.subscribe(self._changed)

    def count(self, role: Role) -> int:
        """Instances of `role`."""
        return sum(count for (of, _), count in self._counts.items() if of == role)

    def followed(self, model: str | None) -> int:
        """How many prefill instances of `model` each of its decode instances follows."""
        return num_followed(self._counts["prefill", model], self._counts["decode", model])

    @property
    def cache_worth(self) -> float:
        """For `Router.cache_worth` of frontends."""
        models = [model for (role, model), count in self._counts.items() if role == "prefill" and count]
        is_partial = any(self.followed(model) < self._counts["prefill", model] for model in models)
        return PARTIAL_CACHE_WORTH if is_partial else 1.0

    def prefill_followings(self) -> int:
        """Pairs of a decode instance and a prefill instance that it follows."""
        models = [model for role, model in self._counts if role == "decode"]
        return sum(self._counts["decode", model] * self.followed(model) for model in models)

    def decode_followings(self) -> int:
        """Pairs of a frontend and a decode instance: frontends follow all of them."""
        return self.count("decode") * self.count("frontend")

    def followings(self, role: Role) -> int:
        """Pairs of an instance of `role`, a worker, and a process that routes to it."""
        return self.prefill_followings() if role == "prefill" else self.decode_followings()

    def heartbeat_rest_s(self, role: Role) -> float:
        """Seconds from a heartbeat of a worker of `role` to its next, at least."""
        return heartbeat_rest_s(self.count(role), self.followings(role))

    def kv_events_rest_s(self, role: Role) -> float:
        """Seconds from a batch of KV events of a worker of `role` to its next, at least."""
        return kv_events_rest_s(self.followings(role))

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is not None:
            self._counts[was.role, was.model] -= 1
        if now is not None:
            self._counts[now.role, now.model] += 1


class Following:
    """The prefill instances of one model that a decode instance follows: two books that change with the mesh's own.

    `chosen` holds those that get new work. `watched` holds these too, and for LINGER_S those that were chosen before: transfers
    from them may be under way, and must not count as lost.
    """

    def __init__(self, book: InstanceBook, me: str, model: str | None) -> None:
        """`me`: the id of the decode instance."""
        self.chosen = InstanceBook()
        self.watched = InstanceBook()
        self._me = me
        self._model = model
        self._prefills: dict[str, InstanceRecord] = {}
        self._decodes: set[str] = {me}
        self._chosen: dict[str, InstanceRecord] = {}
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._on_change: list[Callable[[], None]] = []
        for role in ROLES:
            for record in book.of_role(role, model):
                self._take(None, record)
        self._choose()
        book.subscribe(self._changed)

    @property
    def is_partial(self) -> bool:
        """Whether some prefill instances of the model are not followed."""
        return len(self._chosen) < len(self._prefills)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when a book or `is_partial` may have changed."""
        self._on_change.append(callback)

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if (was is not None and was.model == self._model) or (now is not None and now.model == self._model):
            self._take(was, now)
            self._choose()

    def _take(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        """Note who there is. An instance that left the mesh is dropped at once."""
        if was is not None and was.role == "decode" and was.instance_id != self._me:
            self._decodes.discard(was.instance_id)
        if was is not None and was.role == "prefill":
            self._prefills.pop(was.instance_id, None)
            if now is None:
                self._chosen.pop(was.instance_id, None)
                self._drop(was.instance_id)
                self.chosen.remove(was.instance_id)
        if now is not None and now.model == self._model:
            if now.role == "decode":
                self._decodes.add(now.instance_id)
            elif now.role == "prefill":
                self._prefills[now.instance_id] = now
                if now.instance_id in self._leaving:
                    self.watched.put(now.instance_id, now)

    def _choose(self) -> None:
        count = num_followed(len(self._prefills), len(self._decodes))
        wanted = {record.instance_id: record for record in followed(self._me, list(self._prefills.values()), count)}
        for instance_id in self._chosen.keys() - wanted.keys():
            del self._chosen[instance_id]
            self.chosen.remove(instance_id)
            self._leaving[instance_id] = asyncio.get_running_loop().call_later(LINGER_S, self._drop, instance_id)
        for instance_id, record in wanted.items():
            if (timer := self._leaving.pop(instance_id, None)) is not None:
                timer.cancel()
            if self._chosen.get(instance_id) is not record:
                self._chosen[instance_id] = record
                self.watched.put(instance_id, record)
                self.chosen.put(instance_id, record)
        self._tell()

    def _drop(self, instance_id: str) -> None:
        if (timer := self._leaving.pop(instance_id, None)) is not None:
            timer.cancel()
        self.watched.remove(instance_id)
        self._tell()

    def _tell(self) -> None:
        for callback in self._on_change:
            callback()
