"""The workers of one role, their requests and reports."""

from dataclasses import dataclass, field
from typing import Final

from bench.simulate.incidents import Role
from bench.simulate.routers import Routers
from bench.simulate.steps import Stay
from bench.simulate.traffic import Request
from bench.simulate.worker import Engine, Worker
from components.routing.router import Route, Router
from components.wire.heartbeat import Heartbeat

PHASES: Final = 20  # groups of workers, which send heartbeats one after the other


@dataclass(slots=True, eq=False)
class Flow:
    """One request on its current workers."""

    request: Request
    decode: Worker
    at_decode: Stay
    chooser: Router  # chooses prefill workers, in place of the decode worker
    to_decode: Route
    to_prefill: Route | None = None
    prefill: Worker | None = None
    at_prefill: Stay | None = None
    computed_s: float = -1.0
    reserved_s: float = -1.0
    delivered: bool = False
    over: bool = False


@dataclass(slots=True)
class Group:
    role: Role
    engine: Engine
    routers: Routers
    workers: list[Worker] = field(default_factory=list)  # including dead ones
    by_name: dict[str, Worker] = field(default_factory=dict)
    flows: dict[Worker, dict[Flow, None]] = field(default_factory=dict)
    accepted: dict[Worker, int] = field(default_factory=dict)
    numbers: dict[Worker, int] = field(default_factory=dict)
    reported: dict[Worker, tuple[int, ...]] = field(default_factory=dict)  # load in the latest heartbeat
    load_factors: dict[Worker, float] = field(default_factory=dict)  # of the reported load; 1 if missing
    link_free_s: dict[Worker, float] = field(default_factory=dict)
    phases: list[list[Worker]] = field(default_factory=lambda: [[] for _ in range(PHASES)])

    def __post_init__(self) -> None:
        self.routers.heartbeat_of = self._heartbeat

    def add(self, worker: Worker) -> None:
        self.phases[len(self.workers) % PHASES].append(worker)
        self.numbers[worker] = len(self.workers)
        self.workers.append(worker)
        self.by_name[worker.name] = worker
        self.flows[worker] = {}
        self.accepted[worker] = 0
        self.routers.add(worker)

    def accept(self, worker: Worker) -> int:
        """Count a request that `worker` accepts. Return how many it has accepted."""
        self.accepted[worker] += 1
        return self.accepted[worker]

    def send_heartbeats(self, turn: int) -> None:
        workers = self.phases[turn % PHASES] = [worker for worker in self.phases[turn % PHASES] if worker.alive]
        for worker in workers:
            now = (self.accepted[worker], len(self.flows[worker]), worker.pool.used, worker.queued_now())
            if self.reported.get(worker) != now:  # unchanged reports are skipped
                self.reported[worker] = now
                self.routers.record_heartbeat(self._heartbeat(worker))

    def _heartbeat(self, worker: Worker) -> Heartbeat:
        factor = self.load_factors.get(worker, 1.0)
        return Heartbeat(
            instance_id=worker.name,
            epoch=worker.name,
            step=worker.steps,
            busy=not worker.idle,
            held_pages=int(worker.pool.used * factor),
            total_pages=worker.pool.total,
            queued_tokens=int(worker.queued_now() * factor),
            prompt_tokens_per_s=worker.prompt_tokens_per_s,
            accepted=self.accepted[worker],
            num_requests=int(len(self.flows[worker]) * factor),
        )
