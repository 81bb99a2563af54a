"""Those who choose workers: production's policies over late news of the fleet."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from random import Random

from bench.simulate.clock import Clock
from bench.simulate.traffic import Request
from bench.simulate.worker import Worker
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
    """The routers of one phase: each has a book, breakers and a policy of its own, and all hear the same news.

    The index of blocks is one for all, because they would all hold the same.
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
        self._known: set[str] = set()

    def of(self, turn: int) -> Router:
        """Who chooses, by a number of any size."""
        return self._routers[turn % len(self._routers)]

    def add(self, worker: Worker) -> None:
        """A worker may be chosen from now on."""
        self._known.add(worker.name)
        for router in self._routers:
            member = router.joined(worker.name, worker.name, worker.engine.page_tokens, tells_cache=True)
            member.total_pages = (
                worker.engine.num_pages
            )  # as the first heartbeat says, which comes with the registration

    def remove(self, name: str) -> None:
        """A worker is gone, or leaving."""
        if name in self._known:
            self._known.remove(name)
            self._index.remove(name)
            for router in self._routers:
                router.left(name)

    def heard(self, heartbeat: Heartbeat) -> None:
        """A heartbeat came."""
        for router in self._routers:
            router.heard(heartbeat)

    def changed(self, name: str, stored: list[bytes], removed: list[bytes]) -> None:
        """A worker's cache has changed; it is known here after a while."""
        self._late.append((self._clock.now_s + self._news.event_s, name, stored, removed))

    def choose(self, router: Router, request: Request, tokens: int, tried: Container[str]) -> Chosen | None:
        """A worker for a prompt of `tokens`, none of `tried`."""
        self._listen(self._clock.now_s)
        members: Sequence[Member] = router.book.members
        if tried:
            members = [member for member in members if member.instance_id not in tried]
        prefix = request.blocks[0] if request.blocks else b""
        return router.choose(Ask(tokens, request.session, prefix), lambda _: request.blocks, members)

    def _listen(self, now_s: float) -> None:
        late = self._late
        while late and late[0][0] <= now_s:
            _, name, stored, removed = late.popleft()
            if name in self._known:
                self._index.discard(name, removed)
                self._index.add(name, stored)
