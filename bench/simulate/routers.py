"""The mesh's routing policies, with delayed reports."""

import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from random import Random

from bench.simulate.clock import Clock
from bench.simulate.traffic import Request
from bench.simulate.worker import Worker
from components.routing.candidates import Allowance, CandidateChoice, CandidateQuery, depths
from components.routing.kv_index import KvIndex
from components.routing.policy import Member, Policy, RouteRequest
from components.routing.router import RouteChoice, Router
from components.wire.heartbeat import Heartbeat

MakePolicy = Callable[[Random], Policy]


@dataclass(frozen=True, slots=True)
class Delays:
    """How late routers learn of changes, and how often they may query."""

    heartbeat_s: float = 0.5  # interval; each worker has its own phase
    event_s: float = 0.005  # delay of stored and removed blocks
    lost_s: float = 2.0  # time until routers that have not sent to a lost worker detect the loss
    queries_per_s: float = math.inf  # limit on a router's queries


class Routers:
    """The routers of one role, each with its own book, breakers and policy.

    They follow all workers, or query some for each prompt. They share one block index.
    """

    def __init__(
        self,
        make: MakePolicy,
        count: int,
        seed: str,
        delays: Delays,
        page_tokens: int,
        clock: Clock,
        *,
        or_none: bool = False,
        queries: bool = False,
    ) -> None:
        self._index = KvIndex()
        self._routers = [
            Router(
                make(Random(f"{seed}/{i}")),
                Random(f"{seed}/{i}/health"),
                lambda: clock.now_s,
                self._index,
                page_size=page_tokens,
                or_none=or_none,
            )
            for i in range(count)
        ]
        self._clock = clock
        self._pending_events: deque[tuple[float, str, list[bytes], list[bytes]]] = deque()
        self._delays = delays
        self._workers: dict[str, Worker] = {}
        self._members: Sequence[Member] = ()  # equal in all books
        self._page_tokens = page_tokens
        self._candidates = CandidateChoice(Random(f"{seed}/candidates")) if queries else None
        self._allowances = {router: Allowance() for router in self._routers}
        self.heartbeat_of: Callable[[Worker], Heartbeat] | None = None  # returns the report of a queried worker
        self.num_chosen = self.num_asked = 0

    def of(self, turn: int) -> Router:
        return self._routers[turn % len(self._routers)]

    def add(self, worker: Worker) -> None:
        self._workers[worker.name] = worker
        for router in self._routers:
            _join(router, worker)
        self._members = list(self._routers[0].book.members)

    def remove(self, name: str) -> None:
        if name in self._workers:
            del self._workers[name]
            self._index.remove(name)
            for router in self._routers:
                router.left(name)
            self._members = list(self._routers[0].book.members)

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self._candidates is None:
            for router in self._routers:
                router.record_heartbeat(heartbeat)

    def cache_changed(self, name: str, stored: list[bytes], removed: list[bytes]) -> None:
        self._pending_events.append((self._clock.now_s + self._delays.event_s, name, stored, removed))

    def choose(self, router: Router, request: Request, tokens: int, tried: Container[str]) -> RouteChoice | None:
        self.num_chosen += 1
        if self._candidates is not None:
            return self._choose_by_query(router, request, tokens, tried)
        self._apply_events(self._clock.now_s)
        members: Sequence[Member] = router.book.members
        if tried:
            members = [member for member in members if member.instance_id not in tried]
        return router.choose(_route_request(request, tokens), lambda _: request.blocks, members)

    def _choose_by_query(
        self, router: Router, request: Request, tokens: int, tried: Container[str]
    ) -> RouteChoice | None:
        assert self._candidates is not None
        members, prefixes = self._members, depths(len(request.blocks), self._page_tokens)
        keys = [request.blocks[depth - 1] for depth in prefixes]
        query, allowance = CandidateQuery(router, _route_request(request, tokens)), self._allowances[router]
        for candidates in self._candidates.rounds(keys, members):
            allowed = allowance.reserve(len(candidates), self._delays.queries_per_s, self._clock.now_s)
            if not allowed:
                query.add_fallbacks(members[at].instance_id for at in candidates)
                break
            query.add_answers(
                allowed, self._answers(router, request, tokens, [members[at] for at in candidates[:allowed]], tried)
            )
            if query.is_enough:
                break
        self.num_asked += query.num_asked
        return query.choose()

    def _answers(
        self, router: Router, request: Request, tokens: int, asked: Sequence[Member], tried: Container[str]
    ) -> dict[str, int]:
        """Return the answers of live workers to a query for the prompt's prefixes."""
        assert self.heartbeat_of is not None
        prefixes = depths(len(request.blocks), self._page_tokens)
        answers: dict[str, int] = {}
        for member in asked:
            worker = self._workers[member.instance_id]
            if worker.alive and worker.name not in tried:
                router.record_heartbeat(self.heartbeat_of(worker))
                has = worker.found(request, tokens) // self._page_tokens
                answers[worker.name] = max((d for d in prefixes if d <= has), default=0) * self._page_tokens
        return answers

    def _apply_events(self, now_s: float) -> None:
        pending = self._pending_events
        while pending and pending[0][0] <= now_s:
            _, name, stored, removed = pending.popleft()
            if name in self._workers:
                self._index.discard(name, removed)
                self._index.add(name, stored)


def _route_request(request: Request, tokens: int) -> RouteRequest:
    return RouteRequest(tokens, request.session, request.blocks[0] if request.blocks else b"")


def _join(router: Router, worker: Worker) -> None:
    member = router.joined(
        worker.name, worker.name, worker.engine.page_tokens, kv_events=True, devices=worker.engine.devices
    )
    member.total_pages = worker.engine.num_pages  # known from the heartbeat at registration
