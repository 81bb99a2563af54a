"""One run: a mesh, clients and a schedule of faults; then requests that reuse the pages, and checks of everything."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Final
from unittest import mock
from uuid import UUID

from components.wire.sampling import SamplingParams
from engine.mock import mock_engine
from services.decode import prefill_client as prefill_client_module
from services.decode.prefill_client import PrefillClient
from services.frontend import exchange
from tests.faults.clients import Client
from tests.faults.faults import Chaos, Do, Fault
from tests.faults.http_client import HttpClient
from tests.faults.limits import Limit, Seen, beyond, limit_of
from tests.faults.memory_etcd import MemoryEtcd
from tests.faults.memory_nats import MemoryNats
from tests.faults.memory_transfer import Fabric
from tests.faults.nodes import CLIENT_LIFE_S, COUNTERS, LEASE_TTL_S, NODES, Cluster, Frontend, Node, Worker, found_model
from tests.faults.reference import Reference
from tests.faults.setup import ADAPTER, PLAIN, Setup
from tests.faults.virtual_loop import Process, Running, VirtualLoop, run_virtually

QUIET_WITHIN_S: Final = 90.0
RESTART_S: Final = 1.0
BACK_S: Final = 3.0  # until all processes see that an instance is back
GRACE_S: Final = 1.0  # from a deadline to the client's error
LEAVES_WITHIN_S: Final = 30.0  # of virtual time
FAREWELL_S: Final = 5.0  # by HTTP: to send the last event to a client that does not read
ROLES: Final = ("frontend", "decode", "prefill", "bootstrap")


@dataclass
class Outcome:
    fired: list[Fault]
    problems: list[str]
    trace: list[str]
    clients: list[Client]
    counts: Counter[str]  # of all workers together, by the counter's name
    virtual_s: float
    died: dict[str, BaseException]  # errors of engines that died, by worker
    seen: Seen


class MeshRun:
    """All randomness comes from `seed`."""

    def __init__(
        self,
        home: Path,
        seed: int,
        schedule: list[Fault],
        *,
        setup: Setup = PLAIN,
        counts: dict[str, int] | None = None,
        num_clients: int = 6,
        over_s: float = 0.3,
        life_s: float = CLIENT_LIFE_S,
        max_tokens: Sequence[int] = (1, 2, 8, 20),
        restart_s: float = RESTART_S,
        limit: Limit | None = None,
        prefill_client: Callable[..., PrefillClient] = PrefillClient,
        skews_s: dict[str, float] | None = None,  # of the wall clocks of a role
    ) -> None:
        """Clients start within `over_s` and have a time limit of `life_s`. `limit`: by default that of the schedule."""
        self.random = Random(seed)
        self.problems: list[str] = []
        self.chaos = Chaos(schedule, self._act, self._requested)
        self._limit = limit or limit_of(schedule)
        self._life_s = life_s
        self._max_tokens = max_tokens
        self._restart_s = restart_s
        self._sent_to: dict[str, str] = {}  # by request id: the latest decode instance
        self._ill_until_s: dict[str, float] = {}  # instances that a fault has hit
        self._moves = 0  # of requests, away from healthy instances
        self._counts = counts or {"frontend": 1, "decode": 2, "prefill": 2, "bootstrap": 2}
        self._home = home
        self._setup = setup
        self._skews_s = skews_s or {}
        self._reference = Reference(home)
        self._prompts: list[list[int]] = []
        self._numbers = dict.fromkeys(ROLES, 0)
        self._nodes: list[Node] = []
        self._prefill_client = prefill_client
        self._clients = [self._client(i, self.random.random() * over_s) for i in range(num_clients)]

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_exception_handler(self._broken)
        etcd = MemoryEtcd(Random(self.random.random()), LEASE_TTL_S)
        nats = MemoryNats(self.chaos, Random(self.random.random()))
        fabric = Fabric(self.chaos, Random(self.random.random()))
        self._cluster = Cluster(nats, etcd, fabric, self._home, self._setup, self._prefill_client)
        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(prefill_client_module, "randbits", Random(self.random.random()).getrandbits)
            )
            stack.enter_context(mock.patch.object(exchange, "uuid4", partial(_uuid, Random(self.random.random()))))
            stack.enter_context(mock.patch.object(mock_engine, "model_dir", found_model))
            stack.enter_context(self.chaos.watching())
            await self._start()
            self.chaos.start()
            await self._serve(self._clients)
            self.chaos.recovering = True
            seen = self._seen()
            self.problems += beyond(seen, self._limit, self._setup)
            await self._quiet("after the faults")
            await self._serve_again()
            await self._quiet("after the requests that followed")
            workers = [n for n in self._nodes if isinstance(n, Worker) and hasattr(n, "engine")]
            self.problems += self._reference.wrong_pages(
                {n.id: n.engine.core for n in workers if not n.process.is_dead}
            )
            await self._end()
        self.problems += dict.fromkeys(fabric.violations)
        counts = Counter({name: int(sum(worker.count(name) for worker in workers)) for name in COUNTERS})
        died = {worker.id: worker.died for worker in workers if worker.died is not None}
        return Outcome(
            fired=self.chaos.fired,
            problems=self.problems,
            trace=self.chaos.trace,
            clients=self._clients,
            counts=counts,
            virtual_s=loop.time(),
            died=died,
            seen=seen,
        )

    def _broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if "the engine is not running" not in str(context.get("exception")):  # expected while its process leaves
            self.problems.append(f"event loop: {context}")

    # nodes

    async def _start(self) -> None:
        for role in ROLES:
            for _ in range(self._counts[role]):
                self._new(role)
        tasks = [node.task for node in self._nodes]
        ready = asyncio.create_task(self._all_ready())
        await asyncio.wait((ready, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():  # it has failed
                await task
        await asyncio.sleep(0.6)  # until all heartbeats have arrived
        for node in self._nodes:
            node.settled()

    async def _all_ready(self) -> None:
        for node in self._nodes:
            await node.ready.wait()

    def _new(self, role: str) -> Node:
        self._numbers[role] += 1
        node = NODES[role](self._cluster, self._numbers[role])
        node.process.skew_s = self._skews_s.get(role, 0.0)
        self._nodes.append(node)
        node.task.add_done_callback(partial(self._ended, node))
        return node

    def _live(self, role: str) -> list[Node]:
        return [
            n
            for n in self._nodes
            if n.role == role and not n.process.is_dead and n.ready.is_set() and not n.leave.is_set()
        ]

    def _restart(self, role: str) -> None:
        asyncio.get_running_loop().call_later(self._restart_s, self._join, role)

    def _ended(self, node: Node, _task: "asyncio.Task[None]") -> None:
        """Restart a process whose engine has died, like its supervisor."""
        if isinstance(node, Worker) and node.died is not None:
            self._restart(node.role)

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
                self._cluster.nats.go_away(now_s + fault.amount)
                return True
            case Do.ETCD_AWAY:
                self._cluster.etcd.away_until_s = now_s + fault.amount
                return True
            case Do.CLIENT_GONE | Do.CLIENT_STALLS:
                return self._act_on_client(fault)
        live = self._live(fault.role)
        return bool(live) and self._act_on(live[fault.which % len(live)], fault)

    def _act_on(self, node: Node, fault: Fault) -> bool:
        loop = asyncio.get_running_loop()
        if fault.do in (Do.KILL, Do.DRAIN, Do.STEPS_FAIL, Do.RANK_LOST):
            self._ill_until_s[node.id] = inf
        elif fault.do in (Do.STOP, Do.HANG):
            self._ill_until_s[node.id] = loop.time() + fault.amount + BACK_S
        match fault.do:
            case Do.KILL:
                node.kill()
                for client in self._clients:
                    client.has_left |= client.frontend is node
                self._restart(node.role)
            case Do.STOP | Do.HANG:
                lease = self._cluster.etcd.lease_of(node.id)
                if not node.process.runs or lease is None:
                    return False
                if fault.do is Do.HANG:
                    lease.kept_until_s = loop.time() + fault.amount + BACK_S
                node.process.state = Running.STOPPED
                loop.call_later(fault.amount, node.process.go_on)
            case Do.LEASE:
                lease = self._cluster.etcd.lease_of(node.id)
                if lease is None:
                    return False
                self._cluster.etcd.lose(lease)
            case Do.CUT_OFF:
                self._cluster.etcd.cut_off(node.process, fault.amount)
            case Do.STEPS_FAIL:
                assert isinstance(node, Worker)
                node.fail_steps()
            case Do.RANK_LOST:
                assert isinstance(node, Worker)
                node.lose_rank()
            case Do.DRAIN:
                node.leave.set()
                self._restart(node.role)
            case _:
                raise AssertionError(fault)
        return True

    def _act_on_client(self, fault: Fault) -> bool:
        there = [c for c in self._clients if c.task is not None and not c.task.done() and not c.has_left]
        if not there:
            return False
        client = there[fault.which % len(there)]
        if fault.do is Do.CLIENT_STALLS:
            return client.stall(fault.amount)
        client.leave()
        return True

    def _requested(self, request_id: str, instance_id: str) -> None:
        """Count a move if the request was sent to another, healthy decode instance before."""
        before = self._sent_to.get(request_id, instance_id)
        self._sent_to[request_id] = instance_id
        is_well = asyncio.get_running_loop().time() > self._ill_until_s.get(before, -1.0)
        if before != instance_id and is_well and not self.chaos.recovering:
            self._moves += 1
            self.chaos.note(f"{request_id} moves from {before}, which is well, to {instance_id}")

    # clients

    def _client(self, number: int, at_s: float) -> Client:
        draw = self.random
        prompt = self._prompt()
        temperature = draw.choice((0.0, 1.0))
        sampling = SamplingParams(
            max_tokens=draw.choice(self._max_tokens), temperature=temperature, seed=draw.getrandbits(32)
        )
        adapter = ADAPTER if self._setup.adapters != "none" and draw.random() < 0.4 else ""
        if not self._setup.http:
            return Client(number, [prompt], sampling, at_s, self._life_s, adapter)
        prompts = [prompt, self._prompt()] if draw.random() < 0.2 else [prompt]
        streams = draw.random() < 0.7
        return HttpClient(number, prompts, sampling, at_s, self._life_s, adapter, streams=streams)

    def _prompt(self) -> list[int]:
        draw = self.random
        length = draw.choice((20, 37, 48, 64, 90, 130))
        prompt = [draw.randrange(97, 123) for _ in range(length)]
        if self._prompts and draw.random() < 0.3:  # with the beginning of an earlier one
            prompt[:32] = draw.choice(self._prompts)[:32]
        self._prompts.append(prompt)
        return prompt

    async def _serve(self, clients: list[Client]) -> None:
        """Run `clients`, each from its time on and within its time limit, and check them."""
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
        life_s = self._life_s + GRACE_S + FAREWELL_S * self._setup.http
        stops_s = sum(f.amount for f in self.chaos.fired if f.do is Do.STOP and f.role == "frontend")
        until_s = asyncio.get_running_loop().time() + life_s + stops_s
        while asyncio.get_running_loop().time() < until_s and self._waiting(clients):
            await asyncio.wait(tasks, timeout=0.5)
        self._check(clients)

    def _waiting(self, clients: list[Client]) -> bool:
        return any(
            c.task is not None and not c.task.done() and c.frontend is not None and not c.frontend.process.is_dead
            for c in clients
        )

    def _check(self, clients: list[Client]) -> None:
        broken = any(
            f.do in (Do.GARBLE, Do.ALTER, Do.STEPS_FAIL) or f.field == "InvariantBroken" for f in self.chaos.fired
        )
        for client, answers in self._reference.answers(clients).items():
            problems = client.problems(answers, broken=broken)
            if client.lacks_kv and (self._setup.on_transfer_failure == "recompute" or client.has_begun):
                problems.append("it lacks KV that decode should have computed")
            self.problems += [f"{client}: {problem}" for problem in problems]
            self.chaos.note(f"{client}")

    async def _serve_again(self) -> None:
        """Repeat some requests, which find their cached pages, and send new ones. None may fail."""
        while not self._is_whole():
            await asyncio.sleep(0.1)
        await asyncio.sleep(3.0)  # until all heartbeats have arrived
        first = len(self._clients)
        again = [replace(c, number=first + i, at_s=0.02 * i) for i, c in enumerate(self._clients[:4])]
        fresh = [self._client(first + len(again) + i, 0.1 + 0.02 * i) for i in range(4)]
        await self._serve([*again, *fresh])
        for client in (*again, *fresh):
            if client.error is not None:
                self.problems.append(f"after the faults: {client}")

    def _is_whole(self) -> bool:
        """Whether all processes and both servers run, with an instance of each role."""
        live = [self._live(role) for role in ROLES]
        nodes = [node for nodes in live for node in nodes]
        servers = not self._cluster.nats.is_away and not self._cluster.etcd.is_away
        return servers and all(live) and all(n.process.runs and n.ready.is_set() for n in nodes)

    def _seen(self) -> Seen:
        """A request whose transfer failed does not count as failed with `on_transfer_failure="fail"`."""
        patient = [c for c in self._clients if not c.has_left and not c.has_stalled]
        may_fail = self._setup.on_transfer_failure == "fail"
        failed = [c for c in patient if c.error is not None and not (may_fail and c.lacks_kv)]
        return Seen(max((c.silence_s for c in patient), default=0.0), len(failed), self._moves)

    # checks

    async def _quiet(self, when: str) -> None:
        """Wait until no process holds a request, page or transfer."""
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

    async def _end(self) -> None:
        """End all processes. Living ones must leave no task running."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        living = [n for n in self._nodes if not n.process.is_dead]
        for node in living:
            node.leave.set()
        try:
            async with asyncio.timeout(LEAVES_WITHIN_S):
                await asyncio.gather(*(node.task for node in living))
        except TimeoutError:
            self.problems.append("a process does not leave")
        for node in living:
            left = (task for process in node.processes for task in process.live_tasks() if not process.is_dead)
            self.problems += [f"{node.id}: left with {task}" for task in left]
        self.chaos.is_over = True
        loop.bury()
        loop.set_exception_handler(lambda _loop, _context: None)  # errors of dead processes do not count
        for process in [process for node in self._nodes for process in node.processes if process.is_dead]:
            await _bury(process)


def _uuid(draw: Random) -> UUID:
    return UUID(int=draw.getrandbits(128))


async def _bury(process: Process) -> None:
    process.go_on()
    for _ in range(200):
        tasks = process.live_tasks()
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.1)
    raise AssertionError(f"{process.name} cannot be buried: {process.live_tasks()}")


def run_faults(home: Path, seed: int, schedule: list[Fault], **changes: object) -> Outcome:
    return run_virtually(lambda: MeshRun(home, seed, schedule, **changes).run())


def check(home: Path, seed: int, schedule: list[Fault], **changes: object) -> Outcome:
    """Run it, and on problems fail with the call that replays it."""
    outcome = run_faults(home, seed, schedule, **changes)
    if outcome.problems:
        lines = [
            f"replay: check(home, {seed}, [{', '.join(map(str, schedule))}], **{changes})",
            *outcome.trace,
            *outcome.problems,
        ]
        raise AssertionError("\n".join(lines))
    return outcome
