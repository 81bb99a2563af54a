"""Liveness: leases reveal dead instances, heartbeats silent and hung ones."""

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
from components.messaging.bus import Bus
from components.messaging.fan_out import LONGEST_S, Following
from components.messaging.following import subscribed
from components.messaging.refusals import STRANGER
from components.routing.policy import PromptLoad
from components.wire.codec import unpack
from components.wire.heartbeat import USUAL_NEXT_S, Heartbeat
from components.wire.instances import InstanceRecord, Role
from components.wire.protocol import OLDEST, PROTOCOL

log = logging.getLogger(__name__)

EVERY_S: Final = USUAL_NEXT_S  # between two heartbeats; in a large fleet `next_s`
LATE_S: Final = 1.0  # tolerated delay
SILENT_AFTER_S: Final = 2 * EVERY_S + LATE_S  # two missing heartbeats
HUNG_AFTER_S: Final = 20.0  # longest plausible step: a chunk on a busy CPU takes seconds
STALLED_AFTER_S: Final = EVERY_S + LATE_S  # without a heartbeat or step: then other instances get new work
LONG_STEPS: Final = 2.0  # usual steps, if that is longer
LONGEST_STEP_S: Final = 5.0  # upper bound of a usual step
LATEST: Final = 0.5  # weight of the latest step in the usual time; less for a short step

OnLost = Callable[[InstanceRecord, str], None]  # (instance, reason)
OnHeard = Callable[[Heartbeat], None]


class Loss(StrEnum):
    """Why an instance counts as lost."""

    SILENT = auto()
    HUNG = auto()  # its engine makes no steps
    LEFT = auto()  # its record has left etcd
    REPLACED = auto()  # its process has registered anew
    DRAINED = auto()  # it left in good order


class Sight(StrEnum):
    """What this process may do with an instance."""

    USABLE = auto()
    STALLED = auto()  # used only if all are
    DRAINING = auto()
    LOST = auto()
    OTHER_PROTOCOL = auto()


@dataclass(slots=True)
class _Pulse:
    record: InstanceRecord
    heard: float  # monotonic
    advanced: float  # monotonic: last change of the step counter, or last idle heartbeat
    last: Heartbeat | None = None
    usual_s: float = 0.0  # between steps under load
    asked: float | None = None  # monotonic: oldest unanswered question
    is_lost: bool = False
    is_stalled: bool = False

    @property
    def is_draining(self) -> bool:
        return self.last is not None and self.last.draining

    @property
    def sight(self) -> Sight:
        if not self.record.is_understood:
            return Sight.OTHER_PROTOCOL
        if self.is_lost:
            return Sight.LOST
        if self.is_draining:
            return Sight.DRAINING
        return Sight.STALLED if self.is_stalled else Sight.USABLE


class Liveness:
    """The usable instances of one role. Each loss is reported once.

    A process follows all heartbeats, or asks some instances for one (`asks`). If it asks, an instance is silent
    while a question is unanswered; the others count as alive.
    """

    def __init__(self, book: InstanceBook, role: Role, clock: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self.losses: Counter[Loss] = Counter()
        self._clock = clock
        self._pulses: dict[str, _Pulse] = {}
        self._on_lost: list[OnLost] = []
        self._on_heard: list[OnHeard] = []
        self._next_s = EVERY_S  # of the latest heartbeat
        self._asks = False
        self._watched: Counter[str] = Counter()  # by instance id
        self._unanswered: set[str] = set()  # instance ids
        self._usable: dict[tuple[str | None, str, bool], Sequence[InstanceRecord]] = {}  # cleared by any change
        for record in book.of_role(role):
            self._changed(None, record)
        book.subscribe(self._changed)

    def on_lost(self, callback: OnLost) -> None:
        self._on_lost.append(callback)

    def on_heard(self, callback: OnHeard) -> None:
        self._on_heard.append(callback)

    def usable(self, model: str | None = None, adapter: str = "", *, or_none: bool = False) -> Sequence[InstanceRecord]:
        """Return live instances that accept work, sorted by id.

        Briefly silent or stalled ones are included only if all are so. With `or_none` they never are: the caller
        has an alternative.
        """
        known = self._usable.get((model, adapter, or_none))
        if known is None:
            known = self._usable[model, adapter, or_none] = self._find_usable(model, adapter, or_none=or_none)
        return known

    def _find_usable(self, model: str | None, adapter: str, *, or_none: bool) -> Sequence[InstanceRecord]:
        found = [
            p
            for p in self._pulses.values()
            if not p.is_lost
            and not p.is_draining
            and p.record.is_understood
            and model in (None, p.record.model)
            and (not adapter or adapter in p.record.adapters)
        ]
        running = [p for p in found if not p.is_stalled]
        return sorted((p.record for p in (running if running or or_none else found)), key=lambda r: r.instance_id)

    @property
    def asks(self) -> bool:
        return self._asks

    @asks.setter
    def asks(self, asks: bool) -> None:
        self._asks = asks
        for pulse in self._pulses.values():
            pulse.asked = None
        self._unanswered.clear()
        self.forgive()

    @contextmanager
    def watching(self, instance_id: str) -> Iterator[None]:
        """Keep asking this instance: current work depends on it."""
        self._watched[instance_id] += 1
        try:
            yield
        finally:
            self._watched[instance_id] -= 1
            if not self._watched[instance_id]:
                del self._watched[instance_id]

    def asked(self, instance_id: str) -> None:
        pulse = self._pulses.get(instance_id)
        if pulse is not None and pulse.asked is None:
            pulse.asked = self._clock()
            self._unanswered.add(instance_id)

    def unanswered_s(self, instance_id: str) -> float:
        """Age of the oldest unanswered question; 0 without one."""
        pulse = self._pulses.get(instance_id)
        return 0.0 if pulse is None or pulse.asked is None else self._clock() - pulse.asked

    def to_be_asked(self) -> list[InstanceRecord]:
        """Watched instances, and those that get no work until they answer."""
        return [
            pulse.record
            for instance_id, pulse in self._pulses.items()
            if pulse.asked is not None
            or pulse.is_lost
            or pulse.is_stalled
            or pulse.is_draining
            or instance_id in self._watched
        ]

    def is_usable(self, instance_id: str) -> bool:
        pulse = self._pulses.get(instance_id)
        return pulse is not None and not (pulse.is_lost or pulse.is_stalled or pulse.is_draining)

    def find(self, instance_id: str) -> InstanceRecord | None:
        pulse = self._pulses.get(instance_id)
        return None if pulse is None else pulse.record

    def is_lost(self, instance_id: str) -> bool:
        """True if it is gone, silent or hung, but not for a brief stall."""
        pulse = self._pulses.get(instance_id)
        return pulse is None or pulse.is_lost

    def last_heartbeat(self, instance_id: str) -> Heartbeat | None:
        pulse = self._pulses.get(instance_id)
        return None if pulse is None else pulse.last

    def sights(self) -> Counter[Sight]:
        return Counter(pulse.sight for pulse in self._pulses.values())

    def ages_s(self) -> dict[str, float]:
        """Age of the latest heartbeat, by instance; without one, of the record. Asked instances: of the open question."""
        now = self._clock()
        return {instance_id: self._silent_s(pulse, now) for instance_id, pulse in self._pulses.items()}

    def prompts(self, instance_id: str) -> PromptLoad:
        pulse = self._pulses.get(instance_id)
        if pulse is None or pulse.last is None:
            return PromptLoad(0, 0.0)
        return PromptLoad(pulse.last.queued_tokens, pulse.last.prompt_tokens_per_s, self._clock() - pulse.heard)

    def heard(self, heartbeat: Heartbeat) -> bool:
        """Record a heartbeat. Return False if the epoch is stale or the instance unknown."""
        pulse = self._pulses.get(heartbeat.instance_id)
        if pulse is None or pulse.record.epoch != heartbeat.epoch:
            return False
        now = self._clock()
        if pulse.last is None or pulse.last.step != heartbeat.step or not heartbeat.busy:
            if pulse.last is not None and pulse.last.busy:
                took_s = min(pulse.last.still_s if self._asks else now - pulse.advanced, LONGEST_STEP_S)
                pulse.usual_s += LATEST * min(1.0, took_s / EVERY_S) * (took_s - pulse.usual_s)
            pulse.advanced = now
        if self._asks:
            pulse.advanced = now - max(heartbeat.still_s, 0.0)
        pulse.asked = None
        self._unanswered.discard(heartbeat.instance_id)
        if heartbeat.draining != pulse.is_draining:
            self._usable.clear()
        pulse.heard = now
        pulse.last = heartbeat
        self._next_s = heartbeat.next_s
        if pulse.is_lost and now - pulse.advanced < HUNG_AFTER_S:
            pulse.is_lost = False
            self._usable.clear()
            log.info("instance is back", extra={"instance": heartbeat.instance_id})
        if self._asks:
            self._check(pulse, now)
        else:
            self._update_stalled(pulse, now)
        for callback in self._on_heard:
            callback(heartbeat)
        return True

    def check(self) -> None:
        now = self._clock()
        pulses = [self._pulses[i] for i in self._unanswered] if self._asks else list(self._pulses.values())
        for pulse in pulses:
            self._check(pulse, now)

    def _check(self, pulse: _Pulse, now: float) -> None:
        silent_s, since_step_s = self._silent_s(pulse, now), self._since_step_s(pulse, now)
        if silent_s > silent_after_s(self._next_s_of(pulse)):
            self._lose(pulse, Loss.SILENT, f"silent for {silent_s:.1f} s")
        elif since_step_s > HUNG_AFTER_S:
            self._lose(pulse, Loss.HUNG, f"its engine has been stalled for {since_step_s:.0f} s")
        self._update_stalled(pulse, now)

    def _update_stalled(self, pulse: _Pulse, now: float) -> None:
        stalled_after_s = STALLED_AFTER_S + _beyond_usual_s(self._next_s_of(pulse))
        patience_s = max(stalled_after_s, LONG_STEPS * pulse.usual_s)
        is_stalled = self._silent_s(pulse, now) > stalled_after_s or self._since_step_s(pulse, now) > patience_s
        if is_stalled != pulse.is_stalled:
            pulse.is_stalled = is_stalled
            self._usable.clear()

    def _next_s_of(self, pulse: _Pulse) -> float:
        if self._asks:
            return EVERY_S  # a question is repeated at this interval
        return self._next_s if pulse.last is None else pulse.last.next_s

    def _silent_s(self, pulse: _Pulse, now: float) -> float:
        if self._asks:
            return 0.0 if pulse.asked is None else now - pulse.asked
        return now - pulse.heard

    def _since_step_s(self, pulse: _Pulse, now: float) -> float:
        """Seconds without a step; for a process that asks, as of the last answer."""
        return (pulse.heard if self._asks else now) - pulse.advanced

    def forgive(self) -> None:
        """Start all instances afresh: this process was held up, so their silence may be its own fault."""
        now = self._clock()
        for pulse in self._pulses.values():
            pulse.heard = pulse.advanced = now
            if pulse.asked is not None:
                pulse.asked = now

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if (now or was) is None or (now or was).role != self.role:  # type: ignore[union-attr]
            return
        self._usable.clear()
        if was is not None and now is not None and was.epoch == now.epoch:  # the same process changed its record
            self._pulses[now.instance_id].record = now
            return
        if was is not None and (pulse := self._pulses.pop(was.instance_id, None)) is not None:
            self._unanswered.discard(was.instance_id)
            if now is None:
                self._lose(pulse, Loss.DRAINED if pulse.is_draining else Loss.LEFT, "left etcd")
            else:
                self._lose(pulse, Loss.REPLACED, "registered anew")
        if now is not None:
            warn_of_protocol(was, now)
            at = self._clock()
            self._pulses[now.instance_id] = _Pulse(now, at, at)

    def _lose(self, pulse: _Pulse, loss: Loss, why: str) -> None:
        if pulse.is_lost:
            return
        pulse.is_lost = True
        self.losses[loss] += 1
        self._usable.clear()
        level = logging.INFO if pulse.last is not None and pulse.last.draining else logging.WARNING
        log.log(level, "instance lost", extra={"role": self.role, "instance": pulse.record.instance_id, "why": why})
        for callback in self._on_lost:
            callback(pulse.record, why)


def warn_of_protocol(was: InstanceRecord | None, now: InstanceRecord) -> None:
    if now.is_understood or (was is not None and not was.is_understood):
        return
    facts = {"role": now.role, "instance": now.instance_id, "protocol": now.protocol, "from": now.oldest_protocol}
    log.warning("instance not used: it speaks another protocol", extra={**facts, "ours": PROTOCOL, "ours_from": OLDEST})


def silent_after_s(next_s: float) -> float:
    """Seconds of silence after which an instance is lost."""
    return SILENT_AFTER_S + 2 * _beyond_usual_s(next_s)


def _beyond_usual_s(next_s: float) -> float:
    """The result is bounded, so one bad heartbeat cannot keep an instance alive."""
    return min(max(EVERY_S, next_s), LONGEST_S) - EVERY_S


@asynccontextmanager
async def watch_heartbeats(
    bus: Bus, namespace: str, role: Role, book: InstanceBook, following: Following | None = None
) -> AsyncIterator[Liveness]:
    """While `following` asks, `Questions` delivers the heartbeats instead."""
    liveness = Liveness(book, role)
    if following is not None:
        liveness.asks = following.asks
        following.on_change(lambda: setattr(liveness, "asks", following.asks))

    async def receive(message: Msg) -> None:
        try:
            if not liveness.heard(unpack(message.data, Heartbeat)):
                bus.refusals.count("heartbeat", STRANGER)
        except MalformedMessage as exc:
            bus.refusals.count("heartbeat", exc)
            log.warning("heartbeat refused", extra={"cause": exc.message})

    async def watch() -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(EVERY_S / 2)
            if time.monotonic() - asked > SILENT_AFTER_S / 2 or not bus.client.is_connected:
                liveness.forgive()
            liveness.check()

    async with (
        subscribed(bus, f"{namespace}.{role}.*.heartbeat", receive, following),
        background(watch(), f"watch-{role}"),
    ):
        yield liveness
