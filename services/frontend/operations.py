"""What those who run the mesh ask a frontend: whether it lives, whether a request would succeed, who is there."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from components.discovery.book import InstanceBook
from components.openai.operations import Worker, WorkerList, WorkerLoad, WorkerState
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from services.frontend.ports import Mesh

ROLES: tuple[Role, ...] = ("frontend", "bootstrap", "decode", "prefill")

Condition = Callable[[], str | None]  # why a request would fail now; None: not for this reason


class Seen(Protocol):
    """The workers of one role: as their heartbeats show them, or as they answered a roll call."""

    def last_heartbeat(self, instance_id: str) -> Heartbeat | None:
        """The latest heartbeat of an instance."""

    def is_lost(self, instance_id: str) -> bool:
        """Whether an instance is silent or hung."""


async def _no_workers() -> WorkerList:
    return WorkerList()


class Operations:
    """Of one frontend. All but `workers` are looks into memory."""

    def __init__(
        self,
        mesh: Mesh,
        conditions: Sequence[Condition] = (),
        workers: Callable[[], Awaitable[WorkerList]] = _no_workers,
    ) -> None:
        """`conditions`: beside that of an instance to ask. `workers` may ask others over NATS."""
        self.draining = False  # to be set when this process stops
        self.workers = workers
        self._mesh = mesh
        self._conditions: tuple[Condition, ...] = (self._leaving, *conditions, self._nobody)

    def reasons(self) -> list[str]:
        """Why a request would fail now."""
        return [reason for condition in self._conditions if (reason := condition()) is not None]

    def _leaving(self) -> str | None:
        return "this frontend is leaving" if self.draining else None

    def _nobody(self) -> str | None:
        return None if self._mesh.models() else "no decode instance is usable"


def workers_of(book: InstanceBook, seen: Mapping[Role, Seen]) -> WorkerList:
    """Everyone in `book`, with the load that those report who are in `seen`."""
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
