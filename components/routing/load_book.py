"""What every instance carries: what it said last, and what we have sent it since, so that a burst does not land on one.

Exact without clocks: a worker numbers the requests it accepts, and says with each heartbeat how many those were. A request of
ours is added until a heartbeat tells of its number. Time only bounds what a worker that lies, or a caller that forgets, could
leave behind.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from components.routing.choice import Member
from components.wire.heartbeat import Heartbeat

FORGET_AFTER_S: Final = (
    12.0  # longer than a call may take, and than heartbeats stay away before an instance counts as lost
)
OURS_FOR_S: Final = 600.0  # a request whose end nobody told us of
OVERTAKEN_FOR_S: Final = (
    2.0  # so long an older heartbeat may arrive after a newer one; later, the worker has lied before
)

_id = attrgetter("instance_id")


@dataclass(slots=True, eq=False)
class Sent:
    """A request of ours. Hand it back with `accepted` when its instance answers, and with `over` in any case at its end."""

    tokens: int  # of its prompt, to compute there
    pages: int  # that it will hold there
    sent_s: float
    where: "_Instance"
    branches: int = 1  # that it runs as, there
    number: int | None = None  # what the instance calls it; None: it has not answered
    computed: bool = False  # its prompt is


@dataclass(slots=True, eq=False)
class _Instance:
    epoch: str
    member: Member
    order: tuple[int, int] = (-1, -1)  # of the heartbeat believed last: (accepted, step), neither of which goes back
    heard_s: float = 0.0
    queued_tokens: int = 0  # by that heartbeat
    running: int = 0
    used_pages: int = 0
    # Of our requests there that are not over.
    ours: int = 0  # branches: no fewer can be there, whatever it says
    ours_tokens: int = 0  # of prompts that are not computed
    ours_pages: int = 0
    untold: dict[Sent, None] = field(default_factory=dict)
    untold_tokens: int = 0
    untold_pages: int = 0
    untold_branches: int = 0

    def show(self) -> None:
        """Into the member, where policies look.

        Whoever denies requests of ours is believed in nothing that is less than these would make it. Else it knows better: they
        may share pages, and be computed in part.
        """
        member = self.member
        member.queued_tokens = self.queued_tokens + self.untold_tokens
        member.running = self.running + self.untold_branches
        member.used_pages = self.used_pages + self.untold_pages
        if member.running < self.ours:
            member.running = self.ours
            member.queued_tokens = max(member.queued_tokens, self.ours_tokens)
            member.used_pages = max(member.used_pages, self.ours_pages)


class LoadBook:
    """The members of one role. Who uses it has one thread, and one clock that does not go back."""

    def __init__(self, forget_after_s: float = FORGET_AFTER_S) -> None:
        self._forget_after_s = forget_after_s
        self._instances: dict[str, _Instance] = {}
        self._members: list[Member] = []
        self._untold: dict[Sent, None] = {}  # of all instances, oldest first
        self._ours: dict[Sent, None] = {}  # those that are not over, oldest first

    @property
    def members(self) -> Sequence[Member]:
        """Everyone, by instance id; the same objects as long as they live."""
        return self._members

    @property
    def num_untold(self) -> int:
        """Requests of ours that no heartbeat has told of."""
        return len(self._untold)

    def find(self, instance_id: str) -> Member | None:
        """That one."""
        instance = self._instances.get(instance_id)
        return None if instance is None else instance.member

    def joined(self, instance_id: str, epoch: str, page_size: int = 16) -> Member:
        """An instance registered. With another epoch than before, nothing of what was known holds any more."""
        known = self._instances.get(instance_id)
        if known is not None and known.epoch == epoch:
            return known.member
        self.left(instance_id)
        member = Member(instance_id, page_size=page_size)
        self._instances[instance_id] = _Instance(epoch, member)
        insort(self._members, member, key=_id)
        return member

    def left(self, instance_id: str) -> None:
        """An instance left etcd, and takes everything about it along. One that is merely silent stays: it may come back."""
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        del self._members[bisect_left(self._members, instance_id, key=_id)]
        for sent in instance.untold:
            del self._untold[sent]
        instance.untold.clear()
        for sent in [s for s in self._ours if s.where is instance]:
            del self._ours[sent]

    def send(self, instance_id: str, tokens: int, pages: int, now_s: float, branches: int = 1) -> Sent | None:
        """A request leaves for an instance, with so many prompt tokens to compute there and pages to hold.

        Returns: what `accepted` and `over` want; None when there is no such instance.
        """
        self.expire(now_s)
        instance = self._instances.get(instance_id)
        if instance is None:
            return None
        sent = Sent(tokens, pages, now_s, instance, branches)
        instance.untold[sent] = self._untold[sent] = self._ours[sent] = None
        instance.ours += branches
        instance.ours_tokens += tokens
        instance.ours_pages += pages
        instance.untold_tokens += tokens
        instance.untold_pages += pages
        instance.untold_branches += branches
        instance.show()
        return sent

    def accepted(self, sent: Sent, number: int) -> None:
        """Its instance answered. With the number 0 it does not count: then the next heartbeat is taken to tell of it."""
        sent.number = number
        if 0 < number <= sent.where.order[0]:
            self._told(sent)

    def computed(self, sent: Sent) -> None:
        """Its prompt is: what it brought says so."""
        if sent in self._ours and not sent.computed:
            sent.computed = True
            sent.where.ours_tokens -= sent.tokens
            sent.where.show()

    def over(self, sent: Sent) -> None:
        """Refused, failed, or answered to its end; more than once does no harm."""
        if sent in self._ours:
            self.computed(sent)
            del self._ours[sent]
            sent.where.ours -= sent.branches
            sent.where.ours_pages -= sent.pages
            sent.where.show()
        self._told(sent)

    def _told(self, sent: Sent) -> None:
        """What its instance says includes it from now on."""
        instance = sent.where
        if sent not in instance.untold:
            return
        del instance.untold[sent], self._untold[sent]
        instance.untold_tokens -= sent.tokens
        instance.untold_pages -= sent.pages
        instance.untold_branches -= sent.branches
        instance.show()

    def heard(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat arrived. One of another epoch says nothing, nor does one that a newer one has overtaken."""
        self.expire(now_s)
        instance = self._instances.get(heartbeat.instance_id)
        if instance is None or instance.epoch != heartbeat.epoch:
            return
        order = (heartbeat.accepted, heartbeat.step)
        if order < instance.order and now_s - instance.heard_s < OVERTAKEN_FOR_S:
            return
        instance.order, instance.heard_s = order, now_s
        in_engine = heartbeat.num_running + heartbeat.num_waiting + heartbeat.num_reserved
        instance.queued_tokens = max(heartbeat.queued_tokens, 0)
        instance.running = max(heartbeat.num_requests or in_engine, 0)
        instance.used_pages = max(heartbeat.held_pages, 0)
        instance.member.total_pages = max(heartbeat.total_pages, 0)
        instance.member.prompt_tokens_per_s = max(heartbeat.prompt_tokens_per_s, 0.0)
        for sent in [s for s in instance.untold if s.number is not None and s.number <= heartbeat.accepted]:
            self._told(sent)
        instance.show()

    def expire(self, now_s: float) -> None:
        """Forget what has been on its way for too long; `send` and `heard` do so, too."""
        while self._untold:
            oldest = next(iter(self._untold))
            if now_s - oldest.sent_s < self._forget_after_s:
                break
            self._told(oldest)
        while self._ours:
            oldest = next(iter(self._ours))
            if now_s - oldest.sent_s < OURS_FOR_S:
                break
            self.over(oldest)
