"""Those who choose workers: production's policies over late news of the fleet."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from random import Random

from bench.simulate.clock import Clock
from bench.simulate.traffic import Request
from bench.simulate.worker import Worker
from components.messaging.fan_out import followed, num_followed
from components.routing.choice import Ask, Member, Policy
from components.routing.kv_index import KvIndex
from components.routing.router import Chosen, Router
from components.wire.heartbeat import Heartbeat

MakePolicy = Callable[[Random], Policy]


@dataclass(frozen=True, slots=True)
class News:
    """How late routers hear what."""

    heartbeat_s: float = 0.5  # a worker's load, each worker at times of its own
    event_s: float = 0.005  # blocks stored and removed
    lost_s: float = 2.0  # that a worker is gone, unless one has sent to it before


class Routers:
    """The routers of one phase: each has a book, breakers and a policy of its own.

    All follow the same workers, or each its share of them. The index of blocks is one for all: what it says of workers that a
    router does not follow, the router does not use.
    """

    def __init__(
        self,
        make: MakePolicy,
        count: int,
        seed: str,
        news: News,
        page_tokens: int,
        clock: Clock,
        *,
        or_nobody: bool = False,
        follow_all: bool = True,
    ) -> None:
        self._index = KvIndex()
        self._routers = [
            Router(
                make(Random(f"{seed}/{i}")),
                Random(f"{seed}/{i}/health"),
                lambda: clock.now_s,
                self._index,
                page_size=page_tokens,
                or_nobody=or_nobody,
            )
            for i in range(count)
        ]
        self._clock = clock
        self._late: deque[tuple[float, str, list[bytes], list[bytes]]] = deque()
        self._news = news
        self._known: dict[str, Worker] = {}
        self._follow_all = follow_all
        self._followed: list[set[str]] = [set() for _ in range(count)]  # names, for each router
        self._followers: dict[str, Sequence[Router]] = {}  # by name of a worker
        self._stale = False  # a worker has come or gone since

    def of(self, turn: int) -> Router:
        """Who chooses, by a number of any size."""
        return self._routers[turn % len(self._routers)]

    def add(self, worker: Worker) -> None:
        """A worker may be chosen from now on."""
        self._known[worker.name] = worker
        if not self._follow_all:
            self._stale = True
            return
        self._followers[worker.name] = self._routers
        for router in self._routers:
            _join(router, worker)

    def remove(self, name: str) -> None:
        """A worker is gone, or leaving."""
        if name in self._known:
            del self._known[name]
            self._index.remove(name)
            self._stale = not self._follow_all
            for router in self._followers.pop(name, ()):
                router.left(name)

    def heard(self, heartbeat: Heartbeat) -> None:
        """A heartbeat came."""
        self._share_out()
        for router in self._followers.get(heartbeat.instance_id, ()):
            router.heard(heartbeat)

    def changed(self, name: str, stored: list[bytes], removed: list[bytes]) -> None:
        """A worker's cache has changed; it is known here after a while."""
        self._late.append((self._clock.now_s + self._news.event_s, name, stored, removed))

    def choose(self, router: Router, request: Request, tokens: int, tried: Container[str]) -> Chosen | None:
        """A worker for a prompt of `tokens`, none of `tried`."""
        self._share_out()
        self._listen(self._clock.now_s)
        members: Sequence[Member] = router.book.members
        if tried:
            members = [member for member in members if member.instance_id not in tried]
        prefix = request.blocks[0] if request.blocks else b""
        return router.choose(Ask(tokens, request.session, prefix), lambda _: request.blocks, members)

    def set_cache_worth(self, worth: float) -> None:
        """What all routers use from now on; see `components.routing.choice.Ask`."""
        for router in self._routers:
            router.cache_worth = worth

    def _share_out(self) -> None:
        """Have each router follow its share of the workers that there are now."""
        if not self._stale:
            return
        self._stale = False
        workers = [Member(name) for name in self._known]
        count = num_followed(len(workers), len(self._routers))
        followers: dict[str, list[Router]] = {name: [] for name in self._known}
        for at, router in enumerate(self._routers):
            wanted = {member.instance_id for member in followed(f"decode-{at:05}", workers, count)}
            before, self._followed[at] = self._followed[at], wanted
            for name in before - wanted:
                router.left(name)
            for name in sorted(wanted):
                followers[name].append(router)
                if name not in before:
                    _join(router, self._known[name])
        self._followers = dict(followers)

    def _listen(self, now_s: float) -> None:
        late = self._late
        while late and late[0][0] <= now_s:
            _, name, stored, removed = late.popleft()
            if name in self._known:
                self._index.discard(name, removed)
                self._index.add(name, stored)


def _join(router: Router, worker: Worker) -> None:
    """The router may choose the worker from now on."""
    member = router.joined(worker.name, worker.name, worker.engine.page_tokens, tells_cache=True)
    member.total_pages = worker.engine.num_pages  # as the first heartbeat says, which comes with the registration
