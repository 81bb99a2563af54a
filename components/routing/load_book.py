"""Each instance's load: its last heartbeat plus requests sent since, so a burst is spread.

No clocks are compared: a heartbeat has the number of the latest accepted request.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from components.routing.policy import BY_ID, Member
from components.wire.heartbeat import Heartbeat

UNREPORTED_EXPIRY_S: Final = 12.0  # longer than a call, and than a lost instance's silence
OWN_REQUEST_EXPIRY_S: Final = 600.0  # of a request without a reported end
OVERTAKEN_FOR_S: Final = 2.0  # until then a lower number is a late heartbeat; later it corrects a wrong one


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A sent request. The sender must pass it to `ended`."""

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
    own_branches: int = 0  # this router's
    own_tokens: int = 0  # their prompt tokens still to compute
    own_pages: int = 0
    unreported: dict[RoutedRequest, None] = field(default_factory=dict)
    unreported_tokens: int = 0
    unreported_pages: int = 0
    unreported_branches: int = 0

    def show(self) -> None:
        """Update the member that policies see. If a worker reports fewer requests than ours, our counts are lower bounds.

        Otherwise its report is used, because requests may share pages.
        """
        member = self.member
        member.queued_tokens = self.queued_tokens + self.unreported_tokens
        member.running = self.running + self.unreported_branches
        member.used_pages = self.used_pages + self.unreported_pages
        if member.running < self.own_branches:
            member.running = self.own_branches
            member.queued_tokens = max(member.queued_tokens, self.own_tokens)
            member.used_pages = max(member.used_pages, self.own_pages)


class LoadBook:
    def __init__(self) -> None:
        self._instances: dict[str, _InstanceLoad] = {}
        self._members: list[Member] = []
        self._unreported: dict[RoutedRequest, None] = {}  # oldest first
        self._own_requests: dict[RoutedRequest, None] = {}  # oldest first

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    def find(self, instance_id: str) -> Member | None:
        instance = self._instances.get(instance_id)
        return None if instance is None else instance.member

    def joined(self, instance_id: str, epoch: str, page_size: int = 16, devices: int = 1) -> Member:
        self.left(instance_id)
        member = Member(instance_id, page_size=page_size, devices=devices)
        self._instances[instance_id] = _InstanceLoad(epoch, member)
        insort(self._members, member, key=BY_ID)
        return member

    def left(self, instance_id: str) -> None:
        """Remove an ended instance. A silent one may return, so it stays."""
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        del self._members[bisect_left(self._members, instance_id, key=BY_ID)]
        for sent in instance.unreported:
            del self._unreported[sent]
        instance.unreported.clear()
        for sent in [s for s in self._own_requests if s.where is instance]:
            del self._own_requests[sent]

    def send(self, instance_id: str, tokens: int, pages: int, now_s: float, branches: int = 1) -> RoutedRequest | None:
        """None: the instance is unknown."""
        self.expire(now_s)
        instance = self._instances.get(instance_id)
        if instance is None:
            return None
        sent = RoutedRequest(tokens, pages, now_s, instance, branches)
        instance.unreported[sent] = self._unreported[sent] = self._own_requests[sent] = None
        instance.own_branches += branches
        instance.own_tokens += tokens
        instance.own_pages += pages
        instance.unreported_tokens += tokens
        instance.unreported_pages += pages
        instance.unreported_branches += branches
        instance.show()
        return sent

    def accepted(self, sent: RoutedRequest, number: int) -> None:
        """`number`: the instance's number of the request. With 0, the next heartbeat counts as its report."""
        sent.number = number
        if 0 < number <= sent.where.order[0]:
            self._mark_reported(sent)

    def computed(self, sent: RoutedRequest) -> None:
        if sent in self._own_requests and not sent.computed:
            sent.computed = True
            sent.where.own_tokens -= sent.tokens
            sent.where.show()

    def ended(self, sent: RoutedRequest) -> None:
        if sent in self._own_requests:
            self.computed(sent)
            del self._own_requests[sent]
            sent.where.own_branches -= sent.branches
            sent.where.own_pages -= sent.pages
            sent.where.show()
        self._mark_reported(sent)

    def _mark_reported(self, sent: RoutedRequest) -> None:
        instance = sent.where
        if sent not in instance.unreported:
            return
        del instance.unreported[sent], self._unreported[sent]
        instance.unreported_tokens -= sent.tokens
        instance.unreported_pages -= sent.pages
        instance.unreported_branches -= sent.branches
        instance.show()

    def record_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat of a stale epoch, or older than the last, is ignored."""
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
        for sent in [s for s in instance.unreported if s.number is not None and s.number <= heartbeat.accepted]:
            self._mark_reported(sent)
        instance.show()

    def expire(self, now_s: float) -> None:
        while self._unreported:
            oldest = next(iter(self._unreported))
            if now_s - oldest.sent_s < UNREPORTED_EXPIRY_S:
                break
            self._mark_reported(oldest)
        while self._own_requests:
            oldest = next(iter(self._own_requests))
            if now_s - oldest.sent_s < OWN_REQUEST_EXPIRY_S:
                break
            self.ended(oldest)
