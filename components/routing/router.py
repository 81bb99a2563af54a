"""One phase's choices in one process: who may be asked, what they carry and have cached, and what became of the last ones.

It joins the parts of this package and does no I/O: the services feed it from etcd, NATS and their requests, the simulator from
its own. One thread, one clock.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from components.errors import DeadlineExceeded, MalformedMessage, MeshError, PeerBroken, PeerLost, StaleInstance
from components.routing.approximate_index import ApproximateIndex
from components.routing.choice import Ask, Choice, Identified, Member, Policy
from components.routing.health import Health
from components.routing.kv_index import KvIndex
from components.routing.load_book import LoadBook, Sent
from components.wire.heartbeat import Heartbeat
from components.wire.routes import Candidate, RouteExplained

BlocksOf = Callable[[int], Sequence[bytes]]  # page size → chained hashes of a prompt's full pages
SHOWN: Final = 8  # candidates that a span tells of
# What speaks against an instance: loss, silence, a late answer, a defect there, no understanding.
AGAINST: Final = (PeerLost, DeadlineExceeded, PeerBroken, MalformedMessage)


@dataclass(frozen=True, slots=True)
class Chosen:
    """An instance for one request, not sent yet."""

    instance_id: str
    cached_tokens: int  # of the prompt, that it is believed to have; 0 where there was no choice, and nobody looked
    why: str
    num_candidates: int
    blocks: Sequence[bytes]  # hashes of the prompt by the instance's page size; empty where nobody needed them
    candidates: Sequence[Candidate] = ()  # where the request was to be explained: the chosen one, then by cost

    def facts(self) -> dict[str, str | int]:
        """For a span: why this one."""
        facts: dict[str, str | int] = {
            "kvmesh.route.why": self.why,
            "kvmesh.route.cached_tokens": self.cached_tokens,
            "kvmesh.route.candidates": self.num_candidates,
        }
        if self.candidates:
            facts["kvmesh.route.compared"] = json.dumps([_short(c) for c in self.candidates[:SHOWN]])
        return facts


def _short(candidate: Candidate) -> dict[str, str | float]:
    shown: dict[str, str | float] = {
        "instance": candidate.instance_id,
        "cached": candidate.cached_tokens,
        "queued": candidate.queued_tokens,
        "running": candidate.running,
        "pages": candidate.used_pages,
    }
    if candidate.cost is not None:
        shown["cost"] = round(candidate.cost) if abs(candidate.cost) < 1e15 else "too full"
    return shown


def explained(policy: str, token_ids: bytes, chosen: Chosen | str) -> RouteExplained:
    """The answer to who asks why: `chosen`, or why nobody was; `token_ids`: int32[T] of the prompt."""
    if isinstance(chosen, str):
        return RouteExplained(policy=policy, token_ids=token_ids, why=chosen)
    return RouteExplained(
        policy=policy,
        token_ids=token_ids,
        why=chosen.why,
        chosen=chosen.instance_id,
        candidates=list(chosen.candidates),
    )


class Route:
    """One request on its way to an instance. Whoever sent it says what becomes of it, and at last that it is over."""

    __slots__ = ("_failed", "_left", "_router", "_sent", "_succeeded", "instance_id")

    def __init__(self, router: "Router", instance_id: str, sent: Sent | None, branches: int) -> None:
        self._router = router
        self._sent = sent
        self._left = branches
        self._failed = self._succeeded = False
        self.instance_id = instance_id

    def accepted(self, number: int) -> None:
        """The instance took it, as its `number`th request; 0: it does not count."""
        if self._sent is not None:
            self._router.book.accepted(self._sent, number)

    def succeeded(self) -> None:
        """It brought what was asked for, or begins to, which speaks for the instance."""
        self._succeeded = True
        if self._sent is not None:
            self._router.book.computed(self._sent)
        self._router.health.succeeded(self.instance_id, self._router.now_s)

    def failed(self, error: MeshError) -> None:
        """Count a failure for the instance's breaker, once for all branches, if it is one of `AGAINST`. A refusal is not."""
        counts = isinstance(error, AGAINST) and not isinstance(error, StaleInstance)
        if counts and not self._failed:
            self._failed = True
            self._router.health.failed(self.instance_id, self._router.now_s)

    def over(self) -> None:
        """One branch is there no longer, whatever became of it; with the last of them the request."""
        self._left -= 1
        if self._left:
            return
        if self._sent is not None:
            self._router.book.over(self._sent)
        if not (self._failed or self._succeeded):
            self._router.health.undecided(self.instance_id, self._router.now_s)


class Router:
    """See above. `index` holds what instances tell of their caches, and is kept by somebody else."""

    def __init__(
        self,
        policy: Policy,
        rng: Random,
        clock: Callable[[], float],
        index: KvIndex | None,
        *,
        page_size: int = 16,
        or_nobody: bool = False,
    ) -> None:
        """Without an `index` nobody asks what is cached. `page_size` is that of instances that do not say, in tokens.

        `or_nobody`: whoever asks can do without, so that rather nobody is chosen than somebody who has just failed.
        """
        self.book = LoadBook()
        self.health = Health(rng)
        self.policy = policy
        self._clock = clock
        self._index = index
        self._guess = ApproximateIndex(clock=clock)  # for those that do not tell
        self._usual_page_size = page_size
        self._or_nobody = or_nobody
        self._page_sizes: Counter[int] = Counter()
        self._silent: set[str] = set()  # instances that do not tell what they have cached
        self._usable: Sequence[Identified] | None = None  # asked for last, while nobody has come or gone
        self._members: Sequence[Member] = ()  # the same

    @property
    def now_s(self) -> float:
        """By the clock that it was given."""
        return self._clock()

    def joined(
        self, instance_id: str, epoch: str, page_size: int | None = None, *, tells_cache: bool = False
    ) -> Member:
        """An instance registered, perhaps anew."""
        self.left(instance_id)
        self._usable = None
        size = page_size or self._usual_page_size
        self._page_sizes[size] += 1
        if not tells_cache:
            self._silent.add(instance_id)
        self.health.joined(instance_id, self.now_s)
        return self.book.joined(instance_id, epoch, size)

    def left(self, instance_id: str) -> None:
        """An instance is gone, and everything about it."""
        member = self.book.find(instance_id)
        if member is None:
            return
        self._usable = None
        self._page_sizes[member.page_size] -= 1
        self._page_sizes += Counter()  # drops those that nobody has
        self._silent.discard(instance_id)
        self._guess.remove(instance_id)
        self.health.left(instance_id)
        self.book.left(instance_id)

    def heard(self, heartbeat: Heartbeat) -> None:
        """A heartbeat arrived."""
        self.book.heard(heartbeat, self.now_s)

    def choose(
        self,
        ask: Ask,
        blocks: BlocksOf,
        usable: Sequence[Identified],
        told: Mapping[str, int] | None = None,
    ) -> Chosen | None:
        """One of `usable`, which are in the order of their ids; None when there is none.

        A caller that passes the same sequence again passes the same instances: it is looked through once.

        Args:
            ask: the request.
            blocks: the hashes of its prompt.
            usable: instances that may be chosen.
            told: tokens of the prompt that each of them says it has cached; None: look into the index.
        """
        members = self.health.candidates(self._members_of(usable), self.now_s, or_nobody=self._or_nobody)
        cached = told or {}
        if told is None and self._index is not None and (len(members) > 1 or ask.explain):
            cached = self._cached(blocks)
        choice = self.policy.choose(ask, members, cached, self.now_s)
        if choice is None:
            return None
        member = choice.member
        hashes = blocks(member.page_size) if self._index is not None and member.instance_id in self._silent else ()
        hit = min(cached.get(member.instance_id, 0), max(ask.num_tokens - 1, 0))
        seen = self._seen(members, choice, cached) if ask.explain else ()
        return Chosen(member.instance_id, hit, choice.why, len(members), hashes, seen)

    def explain(self, ask: Ask, blocks: BlocksOf, usable: Sequence[Identified]) -> Chosen | None:
        """What `choose` would say now; nothing is remembered of it."""
        return self.choose(replace(ask, explain=True, dry=True), blocks, usable)

    def send(self, chosen: Chosen, tokens: int, pages: int, branches: int = 1) -> Route:
        """A request leaves for the instance chosen, with so many prompt tokens to compute there and pages to hold."""
        now_s, instance_id = self.now_s, chosen.instance_id
        self.health.sent(instance_id, now_s)
        if chosen.blocks:
            self._guess.routed(instance_id, chosen.blocks)
        return Route(self, instance_id, self.book.send(instance_id, tokens, pages, now_s, branches), branches)

    def pages_for(self, instance_id: str, tokens: int) -> int:
        """Pages of an instance that hold so many tokens."""
        member = self.book.find(instance_id)
        return -(-tokens // (self._usual_page_size if member is None else member.page_size))

    def _members_of(self, usable: Sequence[Identified]) -> Sequence[Member]:
        if usable is not self._usable:
            self._usable = usable
            self._members = [m for one in usable if (m := self.book.find(one.instance_id)) is not None]
        return self._members

    def _cached(self, blocks: BlocksOf) -> Mapping[str, int]:
        """Tokens of the prompt that each instance has: hashes of pages of another size are in no one's cache."""
        assert self._index is not None
        cached: dict[str, int] = {}
        for size in self._page_sizes:
            hashes = blocks(size)
            for found in (self._guess.find(hashes) if self._silent else {}, self._index.find(hashes)):
                for instance_id, depth in found.items():
                    cached[instance_id] = depth * size
        return cached

    def _seen(self, members: Sequence[Member], choice: Choice, cached: Mapping[str, int]) -> Sequence[Candidate]:
        costs = choice.costs or {}
        seen = [
            Candidate(
                instance_id=m.instance_id,
                cached_tokens=cached.get(m.instance_id, 0),
                queued_tokens=m.queued_tokens,
                running=m.running,
                used_pages=m.used_pages,
                total_pages=m.total_pages,
                breaker=str(self.health.state(m.instance_id)),
                cost=costs.get(m.instance_id),
            )
            for m in members
        ]
        return sorted(
            seen,
            key=lambda c: (
                c.instance_id != choice.member.instance_id,
                math.inf if c.cost is None else c.cost,
                c.instance_id,
            ),
        )
