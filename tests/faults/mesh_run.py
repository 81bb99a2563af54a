"""One run: a mesh, clients, a schedule of faults; then quiet, requests that reuse the pages, and what must hold of it all."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final
from unittest import mock
from zlib import crc32

from components.aio import time_limit
from components.errors import InvariantBroken, MeshError
from components.messaging.deadline import now_ms
from components.routing.block_hash import block_hashes
from components.wire.sampling import Sampling
from components.wire.tokens import pack_tokens
from engine.mock.memory import MARK
from engine.ports import EngineRequest
from engine.sampling.wire import sampling_params
from services.bootstrap import rooms
from services.decode.remote_prefill import RemotePrefill
from services.frontend.ports import Prompt
from tests.faults.faults import Chaos, Do, Fault
from tests.faults.memory_etcd import MemoryEtcd
from tests.faults.memory_nats import MemoryNats
from tests.faults.memory_transfer import Fabric
from tests.faults.nodes import ENGINE, LEASE_TTL_S, MODEL, NODES, Cluster, Frontend, Node, Worker, make_engine
from tests.faults.virtual_loop import Running, VirtualLoop, run_virtually

QUIET_WITHIN_S: Final = 90.0
RESTART_S: Final = 1.0
GRACE_S: Final = 1.0  # after a deadline, for the client to hear of it
ROLES: Final = ("frontend", "decode", "prefill", "bootstrap")


@dataclass
class Client:
    """One request and what became of it."""

    number: int
    prompt: list[int]
    sampling: Sampling
    at_s: float
    life_s: float
    frontend: Frontend | None = None
    task: "asyncio.Task[None] | None" = None
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: BaseException | None = None
    has_left: bool = False

    async def run(self, frontend: Frontend) -> None:
        """Read the stream to its end, under the same limit as the HTTP side's."""
        request_id = f"r{self.number}"
        deadline = now_ms() + int(self.life_s * 1000)
        prompt = Prompt(request_id, MODEL, self.prompt, self.sampling, "", deadline)
        try:
            async with (
                time_limit(self.life_s, "the request took longer than"),
                frontend.mesh.generate(prompt) as (deltas,),
            ):
                async for delta in deltas:
                    assert self.finish is None, "tokens after the last one"
                    self.tokens += delta.token_ids
                    self.finish = delta.finish
        except MeshError as exc:
            self.error = exc


@dataclass
class Outcome:
    """What a run gave."""

    fired: list[Fault]
    problems: list[str]
    trace: list[str]
    clients: list[Client]
    virtual_s: float


class MeshRun:
    """See the module. Everything is drawn from `seed`."""

    def __init__(
        self,
        home: Path,
        seed: int,
        schedule: list[Fault],
        *,
        counts: dict[str, int] | None = None,
        num_clients: int = 6,
        over_s: float = 0.3,
        remote_prefill: Callable[..., RemotePrefill] = RemotePrefill,
    ) -> None:
        self.random = Random(seed)
        self.problems: list[str] = []
        self.chaos = Chaos(schedule, self._act)
        self._counts = counts or {"frontend": 1, "decode": 2, "prefill": 2, "bootstrap": 2}
        self._home = home
        self._numbers = dict.fromkeys(ROLES, 0)
        self._nodes: list[Node] = []
        self._remote_prefill = remote_prefill
        self._clients = [self._client(i, self.random.random() * over_s) for i in range(num_clients)]
        self._sequences: list[list[int]] = []  # every prompt with its whole answer

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_exception_handler(self._broken)
        etcd = MemoryEtcd(Random(self.random.random()), LEASE_TTL_S)
        nats = MemoryNats(self.chaos, Random(self.random.random()))
        fabric = Fabric(self.chaos, Random(self.random.random()))
        self._cluster = Cluster(nats, etcd, fabric, self._home, self._remote_prefill)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(rooms, "randbits", Random(self.random.random()).getrandbits))
            stack.enter_context(self.chaos.watching())
            await self._start()
            self.chaos.start()
            await self._serve(self._clients)
            self.chaos.recovering = True
            await self._quiet("after the faults")
            await self._serve_again()
            await self._quiet("after the requests that followed")
            self._check_cached_pages()
            await self._end()
        self.problems += dict.fromkeys(fabric.violations)
        return Outcome(self.chaos.fired, self.problems, self.chaos.trace, self._clients, loop.time())

    def _broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if "the engine is not running" not in str(context.get("exception")):  # its process leaves, whoever still asks
            self.problems.append(f"event loop: {context}")

    # nodes

    async def _start(self) -> None:
        for role in ROLES:
            for _ in range(self._counts[role]):
                self._new(role)
        await asyncio.gather(*(node.ready.wait() for node in self._nodes))
        await asyncio.sleep(0.6)  # everyone has heard everyone's heart
        for node in self._nodes:
            node.settled()

    def _new(self, role: str) -> Node:
        self._numbers[role] += 1
        node = NODES[role](self._cluster, f"{role}{self._numbers[role]}")
        self._nodes.append(node)
        return node

    def _live(self, role: str) -> list[Node]:
        return [
            n
            for n in self._nodes
            if n.role == role and not n.process.is_dead and n.ready.is_set() and not n.leave.is_set()
        ]

    def _restart(self, role: str) -> None:
        asyncio.get_running_loop().call_later(RESTART_S, self._join, role)

    def _join(self, role: str) -> None:
        node = self._new(role)

        async def settle() -> None:
            await node.ready.wait()
            node.settled()

        self._keep = asyncio.ensure_future(settle())

    # faults

    def _act(self, fault: Fault) -> bool:
        now_s = asyncio.get_running_loop().time()
        match fault.do:
            case Do.NATS_AWAY:
                self._cluster.nats.away_until_s = now_s + fault.amount
                return True
            case Do.ETCD_AWAY:
                self._cluster.etcd.away_until_s = now_s + fault.amount
                return True
            case Do.CLIENT_GONE:
                return self._client_gone(fault.which)
        live = self._live(fault.role)
        return bool(live) and self._act_on(live[fault.which % len(live)], fault)

    def _act_on(self, node: Node, fault: Fault) -> bool:
        loop = asyncio.get_running_loop()
        match fault.do:
            case Do.KILL:
                node.process.state = Running.DEAD
                for client in self._clients:
                    client.has_left |= client.frontend is node
                self._restart(node.role)
            case Do.STOP:
                if not node.process.runs:
                    return False
                node.process.state = Running.STOPPED
                loop.call_later(fault.amount, node.process.go_on)
            case Do.LEASE:
                lease = self._cluster.etcd.lease_of(node.id)
                if lease is None:
                    return False
                self._cluster.etcd.lose(lease)
            case Do.DRAIN:
                node.leave.set()
                self._restart(node.role)
            case _:
                raise AssertionError(fault)
        return True

    def _client_gone(self, which: int) -> bool:
        there = [c for c in self._clients if c.task is not None and not c.task.done()]
        if not there:
            return False
        client = there[which % len(there)]
        assert client.task is not None
        client.has_left = True
        client.task.cancel()
        return True

    # clients

    def _client(self, number: int, at_s: float, life_s: float = 25.0) -> Client:
        draw = self.random
        length = draw.choice((20, 37, 48, 64, 90, 130))
        prompt = [draw.randrange(97, 123) for _ in range(length)]
        if number and draw.random() < 0.3:  # begins like another
            prompt[:32] = self._clients_so_far[draw.randrange(len(self._clients_so_far))][:32]
        self._clients_so_far.append(prompt)
        temperature = draw.choice((0.0, 1.0))
        sampling = Sampling(max_tokens=draw.choice((1, 2, 8, 20)), temperature=temperature, seed=draw.getrandbits(32))
        return Client(number, prompt, sampling, at_s, life_s)

    @property
    def _clients_so_far(self) -> list[list[int]]:
        return self.__dict__.setdefault("_prompts", [])

    async def _serve(self, clients: list[Client]) -> None:
        """Run `clients`, each from its time on; none may take longer than its life."""
        started_s = asyncio.get_running_loop().time()
        for client in sorted(clients, key=lambda c: c.at_s):
            await asyncio.sleep(max(0.0, started_s + client.at_s - asyncio.get_running_loop().time()))
            while not (fronts := [n for n in self._live("frontend") if n.process.runs]):
                await asyncio.sleep(0.1)
            front = fronts[client.number % len(fronts)]
            assert isinstance(front, Frontend)
            client.frontend = front
            client.task = front.process.spawn(client.run(front), f"client {client.number}")
        tasks = [c.task for c in clients if c.task is not None and c.frontend is not None]
        life_s = max(c.life_s for c in clients) + GRACE_S
        stops_s = sum(f.amount for f in self.chaos.fired if f.do is Do.STOP and f.role == "frontend")
        until_s = asyncio.get_running_loop().time() + life_s + stops_s
        while asyncio.get_running_loop().time() < until_s and self._waiting(clients):
            await asyncio.wait(tasks, timeout=0.5)
        for client in clients:
            self._check(client)

    def _waiting(self, clients: list[Client]) -> bool:
        return any(
            c.task is not None and not c.task.done() and c.frontend is not None and not c.frontend.process.is_dead
            for c in clients
        )

    def _check(self, client: Client) -> None:
        """Exactly the right tokens, or some of them and exactly one error."""
        assert client.task is not None
        name = f"client {client.number}"
        tokens, finish = self._expected(client)
        if client.tokens != tokens[: len(client.tokens)]:
            self.problems.append(f"{name}: wrong tokens {client.tokens}, expected {tokens}")
        if client.has_left:
            return
        if not client.task.done():
            self.problems.append(f"{name} hangs")
        elif client.task.cancelled() or client.task.exception() is not None:
            self.problems.append(f"{name}: {client.task}")
        elif isinstance(client.error, InvariantBroken) and not self._is_injected(client.error):
            self.problems.append(f"{name}: {client.error!r}")
        elif client.error is None and (client.tokens, client.finish) != (tokens, finish):
            self.problems.append(f"{name}: {client.tokens} {client.finish}, expected {tokens} {finish}")
        elif client.error is not None and not isinstance(client.error, MeshError):
            self.problems.append(f"{name}: {client.error!r} is none of ours")
        self.chaos.note(f"{name}: {len(client.tokens)} tokens, {client.finish}, {client.error!r}")

    def _is_injected(self, error: MeshError) -> bool:
        return error.message == "injected"

    def _expected(self, client: Client) -> tuple[list[int], str]:
        """What an engine alone says."""
        core = make_engine(self._home)
        core.submit(EngineRequest("alone", client.prompt, sampling_params(client.sampling)))
        tokens: list[int] = []
        while True:
            for output in core.step().tokens:
                tokens += output.token_ids
                if output.finish is not None:
                    self._sequences.append([*client.prompt, *tokens])
                    return tokens, str(output.finish)

    async def _serve_again(self) -> None:
        """Requests that find what the first ones left, and such that need every page; nothing may go wrong now."""
        while not self._is_whole():
            await asyncio.sleep(0.1)
        await asyncio.sleep(3.0)  # everyone has heard everyone's heart
        first = len(self._clients)
        again = [Client(first + i, c.prompt, c.sampling, 0.02 * i, 25.0) for i, c in enumerate(self._clients[:4])]
        fresh = [self._client(first + len(again) + i, 0.1 + 0.02 * i) for i in range(4)]
        await self._serve([*again, *fresh])
        for client in (*again, *fresh):
            if client.error is not None:
                self.problems.append(f"client {client.number}, after the faults: {client.error!r}")

    def _is_whole(self) -> bool:
        """Whether every role is there and registered, and both servers too."""
        live = [self._live(role) for role in ROLES]
        nodes = [node for nodes in live for node in nodes]
        servers = not self._cluster.nats.is_away and not self._cluster.etcd.is_away
        return servers and all(live) and all(n.process.runs and n.registration.is_held() for n in nodes)

    # what must hold

    async def _quiet(self, when: str) -> None:
        """Wait until nobody keeps anything."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + QUIET_WITHIN_S
        while left := self._leftovers():
            if loop.time() > until_s:
                self.problems += [f"{when}: {what}" for what in left]
                return
            await asyncio.sleep(0.1 if loop.time() < until_s - QUIET_WITHIN_S + 1 else 0.5)

    def _leftovers(self) -> list[str]:
        stopped = [f"{n.id} is stopped" for n in self._nodes if n.process.state is Running.STOPPED]
        return stopped or [
            what
            for n in self._nodes
            if not n.process.is_dead and n.ready.is_set() and not n.leave.is_set()
            for what in n.leftovers()
        ]

    def _check_cached_pages(self) -> None:
        """Every page that a prompt may find holds what its name says."""
        size = ENGINE.page_size
        named: dict[bytes, int] = {}
        root = b""
        for node in self._nodes:
            if not isinstance(node, Worker) or node.process.is_dead or not hasattr(node, "engine"):
                continue
            core = node.engine.core
            if not root:
                root = core._root_hash("", "")
                for tokens in self._sequences:
                    full = len(tokens) // size
                    hashes = block_hashes(tokens, size, root)
                    named.update(
                        (hashes[i], crc32(pack_tokens(tokens[: (i + 1) * size]))) for i in range(min(full, len(hashes)))
                    )
            pages = core._runner._pages  # type: ignore[attr-defined]
            for block, page in core._memory.prefix._page_of.items():
                marks = {MARK.unpack_from(pages._memory, place) for place in pages._places([page], 0)}
                wanted = (size, named.get(block))
                if marks != {wanted}:
                    self.problems.append(f"{node.id}: page {page} is named {wanted} and holds {sorted(marks)}")

    async def _end(self) -> None:
        """Everyone leaves; the dead are buried. Nothing may be left running."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        living = [n for n in self._nodes if not n.process.is_dead]
        for node in living:
            node.leave.set()
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(node.task for node in living))
        except TimeoutError:
            self.problems.append("somebody does not leave")
        for node in living:
            self.problems += [f"{node.id}: left with {task}" for task in node.process.live_tasks()]
        self.chaos.is_over = True
        loop.bury()
        loop.set_exception_handler(lambda _loop, _context: None)  # nobody listens to what the dead say
        for node in self._nodes:
            if node.process.is_dead:
                await _bury(node)


async def _bury(node: Node) -> None:
    node.process.go_on()
    for _ in range(200):
        tasks = node.process.live_tasks()
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.1)
    raise AssertionError(f"{node.id} cannot be buried: {node.process.live_tasks()}")


def run_faults(home: Path, seed: int, schedule: list[Fault], **changes: object) -> Outcome:
    """One run, with its problems."""
    return run_virtually(lambda: MeshRun(home, seed, schedule, **changes).run())


def check(home: Path, seed: int, schedule: list[Fault], **changes: object) -> Outcome:
    """One run. Fails, with what is needed to run it again."""
    outcome = run_faults(home, seed, schedule, **changes)
    if outcome.problems:
        lines = [
            f"replay: check(home, {seed}, [{', '.join(map(str, schedule))}], **{changes})",
            *outcome.trace,
            *outcome.problems,
        ]
        raise AssertionError("\n".join(lines))
    return outcome
