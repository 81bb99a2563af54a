"""Liveness: expired leases reveal dead instances, missing heartbeats silent or hung ones."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from nats.aio.msg import Msg

from components.aio import background
from components.discovery.book import InstanceBook
from components.errors import MalformedMessage
from components.messaging.bus import PING_EVERY_S, Bus
from components.messaging.fan_out import MAX_INTERVAL_S, SubscriptionChoice
from components.messaging.following import subscribed
from components.messaging.refusals import STRANGER
from components.routing.policy import PromptLoad
from components.wire.codec import OLDEST, PROTOCOL, unpack
from components.wire.heartbeat import USUAL_NEXT_S, Heartbeat
from components.wire.instances import InstanceRecord, Role

log = logging.getLogger(__name__)

EVERY_S: Final = USUAL_NEXT_S  # between heartbeats; in a large fleet their `next_s`
HEARTBEAT_TOLERANCE_S: Final = 1.0
SILENT_AFTER_S: Final = 2 * EVERY_S + HEARTBEAT_TOLERANCE_S  # two missing heartbeats
HUNG_AFTER_S: Final = 20.0  # longest plausible step: a chunk on a busy CPU takes seconds
# An instance is stalled after the longer of these without a heartbeat or step.
STALLED_AFTER_S: Final = EVERY_S + HEARTBEAT_TOLERANCE_S
STALLED_AFTER_STEPS: Final = 2.0  # in usual step times
LONGEST_STEP_S: Final = 5.0  # upper bound of the usual step time
NATS_SILENT_AFTER_S: Final = PING_EVERY_S  # if NATS is silent for longer, instances' silence is ignored
LATEST_STEP_WEIGHT: Final = 0.5  # in the usual step time; less for a short step

OnLost = Callable[[InstanceRecord, str], None]  # (instance, reason)
OnEnded = Callable[[InstanceRecord], None]
OnHeartbeat = Callable[[Heartbeat], None]


class Loss(StrEnum):
    SILENT = auto()
    HUNG = auto()  # it completes no steps
    LEFT = auto()  # it has left etcd
    REPLACED = auto()  # a new process has its id
    DRAINED = auto()  # drained before it left


class InstanceState(StrEnum):
    """An instance as this process sees it: it sends requests to usable ones."""

    USABLE = auto()
    STALLED = auto()  # used only if all instances are stalled
    DRAINING = auto()
    LOST = auto()
    OTHER_PROTOCOL = auto()


@dataclass(slots=True)
class _InstanceHealth:
    record: InstanceRecord
    received_s: float  # monotonic; latest heartbeat
    stepped_s: float  # monotonic; last new step or idle heartbeat
    last: Heartbeat | None = None
    usual_s: float = 0.0  # usual time between steps under load
    queried_s: float | None = None  # monotonic; oldest open query
    is_lost: bool = False
    is_stalled: bool = False

    @property
    def is_draining(self) -> bool:
        return self.last is not None and self.last.draining

    @property
    def state(self) -> InstanceState:
        if not self.record.is_understood:
            return InstanceState.OTHER_PROTOCOL
        if self.is_lost:
            return InstanceState.LOST
        if self.is_draining:
            return InstanceState.DRAINING
        return InstanceState.STALLED if self.is_stalled else InstanceState.USABLE


class Liveness:
    """The usable instances of one role. Each loss is reported once.

    A process subscribes to all heartbeats, or queries some instances for one (`queries_instances`). Then an instance is silent
    while a query is unanswered; the others count as alive.
    """

    def __init__(self, book: InstanceBook, role: Role, clock: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self.losses: Counter[Loss] = Counter()
        self._clock = clock
        self._health: dict[str, _InstanceHealth] = {}
        self._on_lost: list[OnLost] = []
        self._on_ended: list[OnEnded] = []
        self._on_heartbeat: list[OnHeartbeat] = []
        self._next_s = EVERY_S  # `next_s` of the latest heartbeat
        self.queries_instances = False
        self._watched: Counter[str] = Counter()  # by instance id
        self._unanswered: set[str] = set()  # instance ids
        self._usable: dict[tuple[str | None, str, bool], Sequence[InstanceRecord]] = {}  # cleared by any change
        book.follow(role, self._changed)

    def on_lost(self, callback: OnLost) -> None:
        self._on_lost.append(callback)

    def on_ended(self, callback: OnEnded) -> None:
        """Call `callback` when a process has ended: its record has left etcd, or another has its id.

        A silent instance is lost before its process has ended, and may return.
        """
        self._on_ended.append(callback)

    def on_heartbeat(self, callback: OnHeartbeat) -> None:
        self._on_heartbeat.append(callback)

    def usable(self, model: str | None = None, adapter: str = "", *, or_none: bool = False) -> Sequence[InstanceRecord]:
        """Live instances that accept work, sorted by id.

        Briefly silent or stalled ones are included only if there are no others, and never with `or_none`: the caller has an
        alternative.
        """
        known = self._usable.get((model, adapter, or_none))
        if known is None:
            known = self._usable[model, adapter, or_none] = self._find_usable(model, adapter, or_none=or_none)
        return known

    def _find_usable(self, model: str | None, adapter: str, *, or_none: bool) -> Sequence[InstanceRecord]:
        found = [
            p
            for p in self._health.values()
            if not p.is_lost
            and not p.is_draining
            and p.record.is_understood
            and model in (None, p.record.model)
            and (not adapter or adapter in p.record.adapters)
        ]
        running = [p for p in found if not p.is_stalled]
        return sorted((p.record for p in (running if running or or_none else found)), key=lambda r: r.instance_id)

    def query_instances(self, on: bool) -> None:
        """Forget open queries; all times begin anew."""
        self.queries_instances = on
        for health in self._health.values():
            health.queried_s = None
        self._unanswered.clear()
        self.reset_times()

    @contextmanager
    def watching(self, instance_id: str) -> Iterator[None]:
        """Keep querying this instance, because work in progress depends on it."""
        self._watched[instance_id] += 1
        try:
            yield
        finally:
            self._watched[instance_id] -= 1
            if not self._watched[instance_id]:
                del self._watched[instance_id]

    def note_query(self, instance_id: str) -> None:
        health = self._health.get(instance_id)
        if health is not None and health.queried_s is None:
            health.queried_s = self._clock()
            self._unanswered.add(instance_id)

    def unanswered_s(self, instance_id: str) -> float:
        """Age of the oldest unanswered query; 0 without one."""
        health = self._health.get(instance_id)
        return 0.0 if health is None or health.queried_s is None else self._clock() - health.queried_s

    def to_query(self) -> list[InstanceRecord]:
        """The watched instances, and those that get no work until they answer."""
        return [
            health.record
            for instance_id, health in self._health.items()
            if health.queried_s is not None
            or health.is_lost
            or health.is_stalled
            or health.is_draining
            or instance_id in self._watched
        ]

    def is_usable(self, instance_id: str) -> bool:
        health = self._health.get(instance_id)
        return health is not None and not (health.is_lost or health.is_stalled or health.is_draining)

    def find(self, instance_id: str) -> InstanceRecord | None:
        health = self._health.get(instance_id)
        return None if health is None else health.record

    def is_lost(self, instance_id: str) -> bool:
        """True if it is gone, silent or hung. A brief stall does not count."""
        health = self._health.get(instance_id)
        return health is None or health.is_lost

    def last_heartbeat(self, instance_id: str) -> Heartbeat | None:
        health = self._health.get(instance_id)
        return None if health is None else health.last

    def states(self) -> Counter[InstanceState]:
        return Counter(health.state for health in self._health.values())

    def ages_s(self) -> dict[str, float]:
        """Age of the latest heartbeat, else of the record, by instance. For queried ones: of the open query."""
        now = self._clock()
        return {instance_id: self._silent_s(health, now) for instance_id, health in self._health.items()}

    def prompt_load(self, instance_id: str) -> PromptLoad:
        health = self._health.get(instance_id)
        if health is None or health.last is None:
            return PromptLoad(0, 0.0)
        return PromptLoad(health.last.queued_tokens, health.last.prompt_tokens_per_s, self._clock() - health.received_s)

    def record_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Return False if the epoch is stale or the instance unknown."""
        health = self._health.get(heartbeat.instance_id)
        if health is None or health.record.epoch != heartbeat.epoch:
            return False
        now = self._clock()
        if health.last is None or health.last.step != heartbeat.step or not heartbeat.busy:
            if health.last is not None and health.last.busy:
                took_s = min(health.last.still_s if self.queries_instances else now - health.stepped_s, LONGEST_STEP_S)
                health.usual_s += LATEST_STEP_WEIGHT * min(1.0, took_s / EVERY_S) * (took_s - health.usual_s)
            health.stepped_s = now
        if self.queries_instances:
            health.stepped_s = now - max(heartbeat.still_s, 0.0)
        health.queried_s = None
        self._unanswered.discard(heartbeat.instance_id)
        if heartbeat.draining != health.is_draining:
            self._usable.clear()
        health.received_s = now
        health.last = heartbeat
        self._next_s = heartbeat.next_s
        if health.is_lost and now - health.stepped_s < HUNG_AFTER_S:
            health.is_lost = False
            self._usable.clear()
            log.info("instance is back", extra={"instance": heartbeat.instance_id})
        if self.queries_instances:
            self._check(health, now)
        else:
            self._update_stalled(health, now)
        for callback in self._on_heartbeat:
            callback(heartbeat)
        return True

    def check(self) -> None:
        now = self._clock()
        checked = [self._health[i] for i in self._unanswered] if self.queries_instances else list(self._health.values())
        for health in checked:
            self._check(health, now)

    def _check(self, health: _InstanceHealth, now: float) -> None:
        silent_s, since_step_s = self._silent_s(health, now), self._since_step_s(health, now)
        if silent_s > silent_after_s(self._next_s_of(health)):
            self._lose(health, Loss.SILENT, f"silent for {silent_s:.1f} s")
        elif since_step_s > HUNG_AFTER_S:
            self._lose(health, Loss.HUNG, f"its engine has made no step for {since_step_s:.0f} s")
        self._update_stalled(health, now)

    def _update_stalled(self, health: _InstanceHealth, now: float) -> None:
        stalled_after_s = STALLED_AFTER_S + _beyond_usual_s(self._next_s_of(health))
        patience_s = max(stalled_after_s, STALLED_AFTER_STEPS * health.usual_s)
        is_stalled = self._silent_s(health, now) > stalled_after_s or self._since_step_s(health, now) > patience_s
        if is_stalled != health.is_stalled:
            health.is_stalled = is_stalled
            self._usable.clear()

    def _next_s_of(self, health: _InstanceHealth) -> float:
        if self.queries_instances:
            return EVERY_S  # a query is repeated at this interval
        return self._next_s if health.last is None else health.last.next_s

    def _silent_s(self, health: _InstanceHealth, now: float) -> float:
        if self.queries_instances:
            return 0.0 if health.queried_s is None else now - health.queried_s
        return now - health.received_s

    def _since_step_s(self, health: _InstanceHealth, now: float) -> float:
        """Time without a step; for queried instances, as of the last answer."""
        return (health.received_s if self.queries_instances else now) - health.stepped_s

    def reset_times(self) -> None:
        """Call it after a stop of this process, which may have caused the silence."""
        now = self._clock()
        for health in self._health.values():
            health.received_s = health.stepped_s = now
            if health.queried_s is not None:
                health.queried_s = now

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        self._usable.clear()
        if was is not None and now is not None and was.epoch == now.epoch:  # the same process
            self._health[now.instance_id].record = now
            return
        if was is not None and (health := self._health.pop(was.instance_id, None)) is not None:
            self._unanswered.discard(was.instance_id)
            if now is None:
                self._lose(health, Loss.DRAINED if health.is_draining else Loss.LEFT, "left etcd")
            else:
                self._lose(health, Loss.REPLACED, "registered anew")
            for callback in self._on_ended:
                callback(was)
        if now is not None:
            warn_of_protocol(was, now)
            at = self._clock()
            self._health[now.instance_id] = _InstanceHealth(now, at, at)

    def _lose(self, health: _InstanceHealth, loss: Loss, why: str) -> None:
        if health.is_lost:
            return
        health.is_lost = True
        self.losses[loss] += 1
        self._usable.clear()
        level = logging.INFO if health.last is not None and health.last.draining else logging.WARNING
        log.log(level, "instance lost", extra={"role": self.role, "instance": health.record.instance_id, "why": why})
        for callback in self._on_lost:
            callback(health.record, why)


def warn_of_protocol(was: InstanceRecord | None, now: InstanceRecord) -> None:
    if now.is_understood or (was is not None and not was.is_understood):
        return
    facts = {"role": now.role, "instance": now.instance_id, "protocol": now.protocol, "from": now.oldest_protocol}
    log.warning(
        "instance not used: its release has another protocol", extra={**facts, "ours": PROTOCOL, "ours_from": OLDEST}
    )


def silent_after_s(next_s: float) -> float:
    """Silence after which an instance is lost."""
    return SILENT_AFTER_S + 2 * _beyond_usual_s(next_s)


def _beyond_usual_s(next_s: float) -> float:
    """How far `next_s` exceeds the usual; bounded, so one bad heartbeat cannot keep an instance alive."""
    return min(max(EVERY_S, next_s), MAX_INTERVAL_S) - EVERY_S


@asynccontextmanager
async def watch_heartbeats(
    bus: Bus, namespace: str, role: Role, book: InstanceBook, following: SubscriptionChoice | None = None
) -> AsyncIterator[Liveness]:
    """Receive heartbeats and check liveness. If instances are queried, `LoadQueries` delivers the heartbeats."""
    liveness = Liveness(book, role)
    if following is not None:
        liveness.query_instances(following.queries_instances)
        following.on_change(lambda: liveness.query_instances(following.queries_instances))

    async def receive(message: Msg) -> None:
        try:
            if not liveness.record_heartbeat(unpack(message.data, Heartbeat)):
                bus.refusals.count("heartbeat", STRANGER)
        except MalformedMessage as exc:
            bus.refusals.count("heartbeat", exc)
            log.warning("heartbeat refused", extra={"cause": exc.message})

    async def watch() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(EVERY_S / 2)
            if time.monotonic() - began_s > SILENT_AFTER_S / 2 or bus.contact_age_s() > NATS_SILENT_AFTER_S:
                liveness.reset_times()
            liveness.check()

    async with (
        subscribed(bus, f"{namespace}.{role}.*.heartbeat", receive, following),
        background(watch(), f"watch-{role}"),
    ):
        yield liveness
