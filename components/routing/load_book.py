"""Each instance's load: its last heartbeat plus requests sent since, so that a burst is spread.

No clocks are compared: a heartbeat has the number of the latest accepted request.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from components.routing.policy import BY_ID, Member
from components.wire.heartbeat import Heartbeat

FORGET_AFTER_S: Final = 12.0  # longer than a call takes, and than a lost instance's silence
OURS_FOR_S: Final = 600.0  # after this time, a request whose end was never reported no longer counts
OVERTAKEN_FOR_S: Final = 2.0  # until then a lower number is a late heartbeat; later it corrects a wrong one


@dataclass(slots=True, eq=False)
class Sent:
    """A request sent to an instance. The sender must pass it to `over` when it has ended."""

    tokens: int
    pages: int
    sent_s: float
    where: "_InstanceLoad"
    branches: int = 1
    number: int | None = None
    computed: bool = False


@dataclass(slots=True, eq=False)
class _InstanceLoad:
    epoch: str
    member: Member
    order: tuple[int, int] = (-1, -1)  # (accepted, step) of the last heartbeat
    received_s: float = 0.0
    queued_tokens: int = 0
    running: int = 0
    used_pages: int = 0
    ours: int = 0  # this router's branches
    ours_tokens: int = 0  # their prompt tokens that are not computed yet
    ours_pages: int = 0
    uncovered: dict[Sent, None] = field(default_factory=dict)
    uncovered_tokens: int = 0
    uncovered_pages: int = 0
    uncovered_branches: int = 0

    def show(self) -> None:
        """Update the member that policies see. Our own counts are lower bounds if a worker reports fewer requests.

        Otherwise the worker's report is used, because requests may share pages.
        """
        member = self.member
        member.queued_tokens = self.queued_tokens + self.uncovered_tokens
        member.running = self.running + self.uncovered_branches
        member.used_pages = self.used_pages + self.uncovered_pages
        if member.running < self.ours:
            member.running = self.ours
            member.queued_tokens = max(member.queued_tokens, self.ours_tokens)
            member.used_pages = max(member.used_pages, self.ours_pages)


class LoadBook:
    def __init__(self) -> None:
        self._instances: dict[str, _InstanceLoad] = {}
        self._members: list[Member] = []
        self._uncovered: dict[Sent, None] = {}  # oldest first
        self._ours: dict[Sent, None] = {}  # oldest first

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    @property
    def num_uncovered(self) -> int:
        return len(self._uncovered)

    def find(self, instance_id: str) -> Member | None:
        instance = self._instances.get(instance_id)
        return None if instance is None else instance.member

    def joined(self, instance_id: str, epoch: str, page_size: int = 16, devices: int = 1) -> Member:
        known = self._instances.get(instance_id)
        if known is not None and known.epoch == epoch:
            return known.member
        self.left(instance_id)
        member = Member(instance_id, page_size=page_size, devices=devices)
        self._instances[instance_id] = _InstanceLoad(epoch, member)
        insort(self._members, member, key=BY_ID)
        return member

    def left(self, instance_id: str) -> None:
        """Remove an instance that has ended. A silent one stays, because it may return."""
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        del self._members[bisect_left(self._members, instance_id, key=BY_ID)]
        for sent in instance.uncovered:
            del self._uncovered[sent]
        instance.uncovered.clear()
        for sent in [s for s in self._ours if s.where is instance]:
            del self._ours[sent]

    def send(self, instance_id: str, tokens: int, pages: int, now_s: float, branches: int = 1) -> Sent | None:
        """Record a request that is sent to an instance. Returns None for an unknown instance."""
        self.expire(now_s)
        instance = self._instances.get(instance_id)
        if instance is None:
            return None
        sent = Sent(tokens, pages, now_s, instance, branches)
        instance.uncovered[sent] = self._uncovered[sent] = self._ours[sent] = None
        instance.ours += branches
        instance.ours_tokens += tokens
        instance.ours_pages += pages
        instance.uncovered_tokens += tokens
        instance.uncovered_pages += pages
        instance.uncovered_branches += branches
        instance.show()
        return sent

    def accepted(self, sent: Sent, number: int) -> None:
        """Record the number that the instance gave the request. With 0, the next heartbeat covers it."""
        sent.number = number
        if 0 < number <= sent.where.order[0]:
            self._cover(sent)

    def computed(self, sent: Sent) -> None:
        if sent in self._ours and not sent.computed:
            sent.computed = True
            sent.where.ours_tokens -= sent.tokens
            sent.where.show()

    def over(self, sent: Sent) -> None:
        if sent in self._ours:
            self.computed(sent)
            del self._ours[sent]
            sent.where.ours -= sent.branches
            sent.where.ours_pages -= sent.pages
            sent.where.show()
        self._cover(sent)

    def _cover(self, sent: Sent) -> None:
        instance = sent.where
        if sent not in instance.uncovered:
            return
        del instance.uncovered[sent], self._uncovered[sent]
        instance.uncovered_tokens -= sent.tokens
        instance.uncovered_pages -= sent.pages
        instance.uncovered_branches -= sent.branches
        instance.show()

    def record_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Ignore a heartbeat of a stale epoch or older than the last one."""
        self.expire(now_s)
        instance = self._instances.get(heartbeat.instance_id)
        if instance is None or instance.epoch != heartbeat.epoch:
            return
        order = (heartbeat.accepted, heartbeat.step)
        if order < instance.order and now_s - instance.received_s < OVERTAKEN_FOR_S:
            return
        instance.order, instance.received_s = order, now_s
        in_engine = heartbeat.num_running + heartbeat.num_waiting + heartbeat.num_reserved
        instance.queued_tokens = max(heartbeat.queued_tokens, 0)
        instance.running = max(heartbeat.num_requests or in_engine, 0)
        instance.used_pages = max(heartbeat.held_pages, 0)
        instance.member.total_pages = max(heartbeat.total_pages, 0)
        speed = heartbeat.prompt_tokens_per_s
        instance.member.prompt_tokens_per_s = speed if isfinite(speed) and speed > 0 else 0.0
        for sent in [s for s in instance.uncovered if s.number is not None and s.number <= heartbeat.accepted]:
            self._cover(sent)
        instance.show()

    def expire(self, now_s: float) -> None:
        while self._uncovered:
            oldest = next(iter(self._uncovered))
            if now_s - oldest.sent_s < FORGET_AFTER_S:
                break
            self._cover(oldest)
        while self._ours:
            oldest = next(iter(self._ours))
            if now_s - oldest.sent_s < OURS_FOR_S:
                break
            self.over(oldest)
