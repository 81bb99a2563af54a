"""Those who choose workers: production's policies over late news of the fleet."""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from random import Random

from bench.simulate.traffic import Request
from bench.simulate.worker import Worker
from components.routing.choice import Ask, Policy
from components.routing.health import Health
from components.routing.kv_index import KvIndex
from components.routing.load_book import LoadBook, Sent
from components.wire.heartbeat import Heartbeat

MakePolicy = Callable[[Random], Policy]


@dataclass(frozen=True, slots=True)
class News:
    """How late routers hear what."""

    heartbeat_s: float = 0.5  # a worker's load, each worker at times of its own
    event_s: float = 0.005  # blocks stored and removed
    lost_s: float = 2.0  # that a worker is gone, unless one has sent to it before


class Router:
    """One process that chooses: what production has, with nothing around it."""

    def __init__(self, policy: Policy, rng: Random) -> None:
        self.policy = policy
        self.book = LoadBook()
        self.health = Health(rng)


class Routers:
    """The routers of one phase: each has a book, breakers and a policy of its own, and all hear the same news.

    The index of blocks is one for all, because they would all hold the same.
    """

    def __init__(self, make: MakePolicy, count: int, seed: str, news: News, page_tokens: int) -> None:
        self._routers = [Router(make(Random(f"{seed}/{i}")), Random(f"{seed}/{i}/health")) for i in range(count)]
        self._index = KvIndex()
        self._late: deque[tuple[float, str, list[bytes], list[bytes]]] = deque()
        self._news = news
        self._page_tokens = page_tokens
        self._known: set[str] = set()

    def of(self, turn: int) -> Router:
        """Who chooses, by a number of any size."""
        return self._routers[turn % len(self._routers)]

    def add(self, worker: Worker, now_s: float) -> None:
        """A worker may be chosen from now on."""
        self._known.add(worker.name)
        for router in self._routers:
            member = router.book.joined(worker.name, worker.name, now_s, worker.engine.page_tokens)
            member.total_pages = (
                worker.engine.num_pages
            )  # as the first heartbeat says, which comes with the registration
            router.health.joined(worker.name, now_s)

    def remove(self, name: str) -> None:
        """A worker is gone, or leaving."""
        if name in self._known:
            self._known.remove(name)
            self._index.remove(name)
            for router in self._routers:
                router.book.left(name)
                router.health.left(name)

    def heard(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat came."""
        for router in self._routers:
            router.book.heard(heartbeat, now_s)

    def changed(self, name: str, stored: list[bytes], removed: list[bytes], now_s: float) -> None:
        """A worker's cache has changed; it is known here after a while."""
        self._late.append((now_s + self._news.event_s, name, stored, removed))

    def choose(
        self, router: Router, request: Request, tokens: int, tried: Container[str], now_s: float
    ) -> tuple[str, int] | None:
        """Name of a worker for a prompt of `tokens`, none of `tried`, and how many of them it is believed to have."""
        self._listen(now_s)
        members = router.health.candidates(router.book.members, now_s)
        if tried:
            members = [member for member in members if member.instance_id not in tried]
        page = self._page_tokens
        cached = {name: blocks * page for name, blocks in self._index.find(request.blocks).items()}
        prefix = request.blocks[0] if request.blocks else b""
        choice = router.policy.choose(Ask(tokens, request.blocks, request.session, prefix), members, cached, now_s)
        if choice is None:
            return None
        name = choice.member.instance_id
        return name, min(cached.get(name, 0), tokens - 1)

    def _listen(self, now_s: float) -> None:
        late = self._late
        while late and late[0][0] <= now_s:
            _, name, stored, removed = late.popleft()
            if name in self._known:
                self._index.discard(name, removed)
                self._index.add(name, stored)


def send(router: Router, name: str, number: int, tokens: int, pages: int, now_s: float) -> Sent | None:
    """The choice was followed, and the request is the worker's `number`th: `tokens` to compute, `pages` to hold.

    Returns: what the router's book wants back when it is over.
    """
    router.health.sent(name, now_s)
    sent = router.book.send(name, tokens, pages, now_s)
    if sent is not None:
        router.book.accepted(sent, number)
    return sent


def over(router: Router, sent: Sent | None) -> None:
    """The worker has done what it was sent, or never will."""
    if sent is not None:
        router.book.over(sent)
