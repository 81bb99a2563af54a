"""One process's choice among a role's instances. No I/O, so that the simulator can run it."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from components.errors import DeadlineExceeded, MalformedMessage, MeshError, PeerBroken, PeerLost, StaleInstance
from components.routing.approximate_index import ApproximateIndex
from components.routing.health import Health, Trial
from components.routing.kv_index import KvIndex
from components.routing.load_book import LoadBook, RoutedRequest
from components.routing.policy import HasInstanceId, Member, Policy, PolicyChoice, RouteRequest
from components.wire.heartbeat import Heartbeat
from components.wire.inspection import Candidate, RouteExplained

BlocksOf = Callable[[int], Sequence[bytes]]  # page size → block hashes
MAX_SHOWN_CANDIDATES: Final = 8  # in a span
# an instance's failures
INSTANCE_FAILURES: Final = (PeerLost, DeadlineExceeded, PeerBroken, MalformedMessage)


@dataclass(frozen=True, slots=True)
class RouteChoice:
    instance_id: str
    cached_tokens: int  # of the prompt, as expected
    why: str
    num_candidates: int
    blocks: Sequence[bytes]  # block hashes, for the approximate index
    candidates: Sequence[Candidate] = ()  # if explained: the chosen one first

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kvmesh.route.why": self.why, "kvmesh.route.candidates": self.num_candidates}
        if self.num_candidates > 1:  # the cache of a single one is not looked up
            facts["kvmesh.route.cached_tokens"] = self.cached_tokens
        if self.candidates:
            facts["kvmesh.route.compared"] = _Compared(self.candidates[:MAX_SHOWN_CANDIDATES])
        return facts


class _Compared:
    """Converted to JSON only when it is read, because most spans are never exported."""

    __slots__ = ("_candidates",)

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def __str__(self) -> str:
        return json.dumps([_short(c) for c in self._candidates])


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
    """A routed request. The sender reports outcomes, and calls `ended` for every branch."""

    __slots__ = ("_branches_left", "_failed", "_router", "_sent", "_succeeded", "_trial", "instance_id")

    def __init__(
        self, router: "Router", instance_id: str, sent: RoutedRequest | None, branches: int, trial: Trial | None
    ) -> None:
        self._router = router
        self._sent = sent
        self._branches_left = branches
        self._trial = trial
        self._failed = self._succeeded = False
        self.instance_id = instance_id

    def accepted(self, number: int) -> None:
        if self._sent is not None:
            self._router.book.accepted(self._sent, number)

    def succeeded(self) -> None:
        self._succeeded = True
        if self._sent is not None:
            self._router.book.computed(self._sent)
        if self._is_same_process:
            self._router.health.succeeded(self.instance_id, self._router.now_s)

    def failed(self, error: MeshError) -> None:
        """A failure of the instance counts once for all branches."""
        counts = isinstance(error, INSTANCE_FAILURES) and not isinstance(error, StaleInstance) and self._is_same_process
        if counts and not self._failed:
            self._failed = True
            self._router.health.failed(self.instance_id, self._router.now_s)

    def ended(self) -> None:
        self._branches_left -= 1
        if self._branches_left:
            return
        if self._sent is not None:
            self._router.book.ended(self._sent)
        if self._trial is not None and not (self._failed or self._succeeded):
            self._router.health.undecided(self.instance_id, self._trial, self._router.now_s)

    @property
    def _is_same_process(self) -> bool:
        """A restarted process must not be blamed."""
        return self._sent is not None and self._router.book.find(self.instance_id) is self._sent.where.member


class Router:
    def __init__(
        self,
        policy: Policy,
        rng: Random,
        clock: Callable[[], float],
        index: KvIndex | None,
        *,
        page_size: int = 16,
        or_none: bool = False,
    ) -> None:
        """Without an `index`, which its owner updates, caches are ignored.

        `or_none`: choose none if every breaker is open.
        """
        self.book = LoadBook()
        self.health = Health(rng)
        self.policy = policy
        self._clock = clock
        self._index = index
        self._guess = ApproximateIndex(clock=clock)  # without KV events
        self._usual_page_size = page_size
        self._or_none = or_none
        self._page_sizes: Counter[int] = Counter()
        self._without_kv_events: set[str] = set()
        self._usable: Sequence[HasInstanceId] | None = None  # of the last request; None: instances have changed
        self._members: Sequence[Member] = ()

    @property
    def now_s(self) -> float:
        return self._clock()

    def joined(
        self, instance_id: str, epoch: str, page_size: int | None = None, *, kv_events: bool = False, devices: int = 1
    ) -> Member:
        self.left(instance_id)
        self._usable = None
        size = page_size or self._usual_page_size
        self._page_sizes[size] += 1
        if not kv_events:
            self._without_kv_events.add(instance_id)
        self.health.joined(instance_id, self.now_s)
        return self.book.joined(instance_id, epoch, size, devices)

    def left(self, instance_id: str) -> None:
        member = self.book.find(instance_id)
        if member is None:
            return
        self._usable = None
        self._page_sizes[member.page_size] -= 1
        self._page_sizes += Counter()  # drops zero counts
        self._without_kv_events.discard(instance_id)
        self._guess.remove(instance_id)
        self.health.left(instance_id)
        self.book.left(instance_id)

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.book.record_heartbeat(heartbeat, self.now_s)

    def choose(
        self,
        request: RouteRequest,
        blocks: BlocksOf,
        usable: Sequence[HasInstanceId],
        reported: Mapping[str, int] | None = None,
    ) -> RouteChoice | None:
        """Return one of `usable`, or None.

        Args:
            usable: sorted by id. Pass another object if it changes: it is scanned once.
            reported: cached tokens that instances reported; None: use the index.
        """
        members = self.candidates(usable)
        if not members:
            return None
        cached = reported or {}
        is_alone = reported is None and len(members) == 1 and not request.explain  # then its cache is not looked up
        if reported is None and self._index is not None and not is_alone:
            cached = self._cached(blocks)
        choice = self.policy.choose(request, members, cached, self.now_s)
        member, why = choice.member, "the only instance" if is_alone else choice.why
        hashes = (
            blocks(member.page_size)
            if self._index is not None and member.instance_id in self._without_kv_events
            else ()
        )
        hit = min(cached.get(member.instance_id, 0), max(request.num_tokens - 1, 0))
        shown = self._shown_candidates(members, choice, cached) if request.explain else ()
        return RouteChoice(member.instance_id, hit, why, len(members), hashes, shown)

    def candidates(self, usable: Sequence[HasInstanceId]) -> Sequence[Member]:
        """Those that `choose` may take now: without open breakers, and with credit while they warm up."""
        return self.health.candidates(self._members_of(usable), self.now_s, or_none=self._or_none)

    def explain(self, request: RouteRequest, blocks: BlocksOf, usable: Sequence[HasInstanceId]) -> RouteChoice | None:
        return self.choose(replace(request, explain=True, dry=True), blocks, usable)

    def send(self, chosen: RouteChoice, tokens: int, pages: int, branches: int = 1) -> Route:
        """`tokens`: to compute there; `pages`: to hold there."""
        now_s, instance_id = self.now_s, chosen.instance_id
        trial = self.health.sent(instance_id, now_s)
        if chosen.blocks:
            self._guess.routed(instance_id, chosen.blocks)
        sent = self.book.send(instance_id, tokens, pages, now_s, branches)
        return Route(self, instance_id, sent, branches, trial)

    def pages_for(self, instance_id: str, tokens: int) -> int:
        member = self.book.find(instance_id)
        return -(-tokens // (self._usual_page_size if member is None else member.page_size))

    def _members_of(self, usable: Sequence[HasInstanceId]) -> Sequence[Member]:
        if usable is not self._usable:
            self._usable = usable
            self._members = [m for one in usable if (m := self.book.find(one.instance_id)) is not None]
        return self._members

    def _cached(self, blocks: BlocksOf) -> Mapping[str, int]:
        assert self._index is not None
        cached: dict[str, int] = {}
        for size in self._page_sizes:
            hashes = blocks(size)
            for found in (self._guess.find(hashes) if self._without_kv_events else {}, self._index.find(hashes)):
                for instance_id, depth in found.items():
                    cached[instance_id] = depth * size
        return cached

    def _shown_candidates(
        self, members: Sequence[Member], choice: PolicyChoice, cached: Mapping[str, int]
    ) -> Sequence[Candidate]:
        costs = choice.costs or {}
        shown = [
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
            shown,
            key=lambda c: (
                c.instance_id != choice.member.instance_id,
                math.inf if c.cost is None else c.cost,
                c.instance_id,
            ),
        )
