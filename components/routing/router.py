"""One phase's choices in one process: health, load, caches, and the outcome of earlier requests.

No I/O: services feed it from etcd, NATS and their requests, the simulator from its own. One thread, one clock.
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
from components.routing.health import Health
from components.routing.kv_index import KvIndex
from components.routing.load_book import LoadBook, Sent
from components.routing.policy import HasInstanceId, Member, Policy, PolicyChoice, RouteRequest
from components.wire.heartbeat import Heartbeat
from components.wire.inspection import Candidate, RouteExplained

BlocksOf = Callable[[int], Sequence[bytes]]  # page size → chained hashes of a prompt's full pages
SHOWN: Final = 8  # candidates in a span
# counted as failures of an instance: loss, silence, delay, defects, unintelligible answers
AGAINST: Final = (PeerLost, DeadlineExceeded, PeerBroken, MalformedMessage)


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """An instance for one request that is not sent yet."""

    instance_id: str
    cached_tokens: int  # expected cached tokens of the prompt; 0 if there was no choice
    why: str
    num_candidates: int
    blocks: Sequence[bytes]  # the prompt's hashes by the instance's page size; empty if not needed
    candidates: Sequence[Candidate] = ()  # if the request was to be explained: the chosen one, then by cost

    def facts(self) -> dict[str, str | int]:
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


def explained(policy: str, token_ids: bytes, chosen: RouteChoice | str) -> RouteExplained:
    """The answer of `inspect route`; `token_ids`: int32[T] of the prompt."""
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
    """One request on its way to an instance. Its sender reports each outcome, and always `over`."""

    __slots__ = ("_failed", "_left", "_router", "_sent", "_succeeded", "instance_id")

    def __init__(self, router: "Router", instance_id: str, sent: Sent | None, branches: int) -> None:
        self._router = router
        self._sent = sent
        self._left = branches
        self._failed = self._succeeded = False
        self.instance_id = instance_id

    def accepted(self, number: int) -> None:
        """The instance's number for it; 0: it does not count."""
        if self._sent is not None:
            self._router.book.accepted(self._sent, number)

    def succeeded(self) -> None:
        self._succeeded = True
        if self._sent is not None:
            self._router.book.computed(self._sent)
        self._router.health.succeeded(self.instance_id, self._router.now_s)

    def failed(self, error: MeshError) -> None:
        """Count a failure for the breaker, once for all branches, if it is one of `AGAINST`."""
        counts = isinstance(error, AGAINST) and not isinstance(error, StaleInstance)
        if counts and not self._failed:
            self._failed = True
            self._router.health.failed(self.instance_id, self._router.now_s)

    def over(self) -> None:
        self._left -= 1
        if self._left:
            return
        if self._sent is not None:
            self._router.book.over(self._sent)
        if not (self._failed or self._succeeded):
            self._router.health.undecided(self.instance_id, self._router.now_s)


class Router:
    """`index` has what instances publish of their caches; its owner updates it."""

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
        """Without an `index` caches are ignored. `page_size`: default for instances that report none, in tokens.

        `or_nobody`: choose none rather than an instance that has just failed.
        """
        self.book = LoadBook()
        self.health = Health(rng)
        self.policy = policy
        self._clock = clock
        self._index = index
        self._guess = ApproximateIndex(clock=clock)  # for instances without KV events
        self._usual_page_size = page_size
        self._or_nobody = or_nobody
        self._page_sizes: Counter[int] = Counter()
        self._silent: set[str] = set()  # instances without KV events
        self._usable: Sequence[HasInstanceId] | None = (
            None  # the sequence of the last request, while instances are the same
        )
        self._members: Sequence[Member] = ()  # of that sequence

    @property
    def now_s(self) -> float:
        return self._clock()

    def joined(
        self, instance_id: str, epoch: str, page_size: int | None = None, *, tells_cache: bool = False
    ) -> Member:
        self.left(instance_id)
        self._usable = None
        size = page_size or self._usual_page_size
        self._page_sizes[size] += 1
        if not tells_cache:
            self._silent.add(instance_id)
        self.health.joined(instance_id, self.now_s)
        return self.book.joined(instance_id, epoch, size)

    def left(self, instance_id: str) -> None:
        member = self.book.find(instance_id)
        if member is None:
            return
        self._usable = None
        self._page_sizes[member.page_size] -= 1
        self._page_sizes += Counter()  # drops zero counts
        self._silent.discard(instance_id)
        self._guess.remove(instance_id)
        self.health.left(instance_id)
        self.book.left(instance_id)

    def heard(self, heartbeat: Heartbeat) -> None:
        self.book.heard(heartbeat, self.now_s)

    def choose(
        self,
        request: RouteRequest,
        blocks: BlocksOf,
        usable: Sequence[HasInstanceId],
        told: Mapping[str, int] | None = None,
    ) -> RouteChoice | None:
        """One of `usable`, which are sorted by id; None if there are none.

        The same sequence must mean the same instances: it is scanned once.

        Args:
            blocks: the prompt's hashes.
            told: cached tokens that each instance reported; None: use the index.
        """
        members = self.health.candidates(self._members_of(usable), self.now_s, or_nobody=self._or_nobody)
        cached = told or {}
        if told is None and self._index is not None and (len(members) > 1 or request.explain):
            cached = self._cached(blocks)
        choice = self.policy.choose(request, members, cached, self.now_s)
        if choice is None:
            return None
        member = choice.member
        hashes = blocks(member.page_size) if self._index is not None and member.instance_id in self._silent else ()
        hit = min(cached.get(member.instance_id, 0), max(request.num_tokens - 1, 0))
        seen = self._seen(members, choice, cached) if request.explain else ()
        return RouteChoice(member.instance_id, hit, choice.why, len(members), hashes, seen)

    def explain(self, request: RouteRequest, blocks: BlocksOf, usable: Sequence[HasInstanceId]) -> RouteChoice | None:
        """What `choose` would answer now, without a trace of the question."""
        return self.choose(replace(request, explain=True, dry=True), blocks, usable)

    def send(self, chosen: RouteChoice, tokens: int, pages: int, branches: int = 1) -> Route:
        """A request leaves with so many prompt tokens to compute and pages to hold."""
        now_s, instance_id = self.now_s, chosen.instance_id
        self.health.sent(instance_id, now_s)
        if chosen.blocks:
            self._guess.routed(instance_id, chosen.blocks)
        return Route(self, instance_id, self.book.send(instance_id, tokens, pages, now_s, branches), branches)

    def pages_for(self, instance_id: str, tokens: int) -> int:
        member = self.book.find(instance_id)
        return -(-tokens // (self._usual_page_size if member is None else member.page_size))

    def _members_of(self, usable: Sequence[HasInstanceId]) -> Sequence[Member]:
        if usable is not self._usable:
            self._usable = usable
            self._members = [m for one in usable if (m := self.book.find(one.instance_id)) is not None]
        return self._members

    def _cached(self, blocks: BlocksOf) -> Mapping[str, int]:
        """Cached tokens of the prompt at each instance. Hashes of another page size match nothing."""
        assert self._index is not None
        cached: dict[str, int] = {}
        for size in self._page_sizes:
            hashes = blocks(size)
            for found in (self._guess.find(hashes) if self._silent else {}, self._index.find(hashes)):
                for instance_id, depth in found.items():
                    cached[instance_id] = depth * size
        return cached

    def _seen(self, members: Sequence[Member], choice: PolicyChoice, cached: Mapping[str, int]) -> Sequence[Candidate]:
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
