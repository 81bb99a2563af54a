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

BEATS: Final = 20  # groups of workers, each with its own phase of heartbeats


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
    told: dict[Worker, tuple[int, ...]] = field(default_factory=dict)
    lies: dict[Worker, float] = field(default_factory=dict)
    link_free_s: dict[Worker, float] = field(default_factory=dict)
    beats: list[list[Worker]] = field(default_factory=lambda: [[] for _ in range(BEATS)])

    def __post_init__(self) -> None:
        self.routers.beat_of = self._heartbeat

    def add(self, worker: Worker) -> None:
        self.beats[len(self.workers) % BEATS].append(worker)
        self.numbers[worker] = len(self.workers)
        self.workers.append(worker)
        self.by_name[worker.name] = worker
        self.flows[worker] = {}
        self.accepted[worker] = 0
        self.routers.add(worker)

    def accept(self, worker: Worker) -> int:
        """Add a worker and return its number."""
        self.accepted[worker] += 1
        return self.accepted[worker]

    def beat(self, turn: int) -> None:
        beats = self.beats[turn % BEATS] = [worker for worker in self.beats[turn % BEATS] if worker.alive]
        for worker in beats:
            now = (self.accepted[worker], len(self.flows[worker]), worker.pool.used, worker.queued_now())
            if self.told.get(worker) != now:  # unchanged reports are skipped
                self.told[worker] = now
                self.routers.record_heartbeat(self._heartbeat(worker))

    def _heartbeat(self, worker: Worker) -> Heartbeat:
        told = self.lies.get(worker, 1.0)
        return Heartbeat(
            instance_id=worker.name,
            epoch=worker.name,
            step=worker.steps,
            busy=not worker.idle,
            held_pages=int(worker.pool.used * told),
            total_pages=worker.pool.total,
            queued_tokens=int(worker.queued_now() * told),
            prompt_tokens_per_s=worker.prompt_tokens_per_s,
            accepted=self.accepted[worker],
            num_requests=int(len(self.flows[worker]) * told),
        )
