"""The operators' view of a frontend: whether it is alive and ready, and which workers exist."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from components.discovery.book import InstanceBook
from components.discovery.pages import ScrapeTarget
from components.openai.operations import Worker, WorkerList, WorkerLoad, WorkerState
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from services.frontend.ports import Mesh

ROLES: tuple[Role, ...] = ("frontend", "bootstrap", "decode", "prefill")

DRAINING: Final = "this frontend is draining"
Condition = Callable[[], str | None]  # returns why a request would fail now, or None


class Seen(Protocol):
    """The workers of one role, by their heartbeats or their answers to a query for them."""

    def last_heartbeat(self, instance_id: str) -> Heartbeat | None:
        pass

    def is_lost(self, instance_id: str) -> bool:
        """Return whether an instance is silent or hung."""


async def _no_workers() -> WorkerList:
    return WorkerList()


@dataclass(slots=True)
class DrainOrder:
    """An operator's drain order: new requests are refused, while the process keeps running."""

    draining: bool = False


class Operations:
    """Only `workers` does I/O."""

    def __init__(
        self,
        mesh: Mesh,
        conditions: Sequence[Condition] = (),
        workers: Callable[[], Awaitable[WorkerList]] = _no_workers,
        targets: Callable[[str], list[ScrapeTarget]] = lambda _: [],
    ) -> None:
        """`conditions`: further checks for readiness. `workers`: lists all workers; may use NATS. `targets`: by Host header."""
        self.draining = False  # set when this process stops
        self.order = DrainOrder()
        self.workers = workers
        self.targets = targets
        self._mesh = mesh
        self._conditions: tuple[Condition, ...] = (self._draining, *conditions, self._no_models)

    def reasons(self) -> list[str]:
        """Return the reasons why a request would fail now; empty if this frontend is ready."""
        return [reason for condition in self._conditions if (reason := condition()) is not None]

    @property
    def is_draining(self) -> bool:
        return self.draining or self.order.draining

    def _draining(self) -> str | None:
        return DRAINING if self.is_draining else None

    def _no_models(self) -> str | None:
        return None if self._mesh.models() else "no decode instance is usable"


def workers_of(book: InstanceBook, seen: Mapping[Role, Seen]) -> WorkerList:
    """Return all instances of `book`, with their load if they are in `seen`."""
    return WorkerList(data=[_worker(record, seen.get(role)) for role in ROLES for record in book.of_role(role)])


def _worker(record: InstanceRecord, seen: Seen | None) -> Worker:
    beat = None if seen is None else seen.last_heartbeat(record.instance_id)
    return Worker(
        id=record.instance_id,
        role=record.role,
        epoch=record.epoch,
        host=record.host,
        pid=record.pid,
        started=record.started_unix_ms // 1000,
        model=record.model,
        adapters=sorted(record.adapters),
        max_model_len=record.max_context,
        state=None if seen is None else _state(record, seen, beat),
        load=None if beat is None else WorkerLoad.model_validate(beat, from_attributes=True),
    )


def _state(record: InstanceRecord, seen: Seen, beat: Heartbeat | None) -> WorkerState:
    if seen.is_lost(record.instance_id):
        return "silent"
    return "draining" if beat is not None and beat.draining else "up"
