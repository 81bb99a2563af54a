"""What those who run the mesh ask a frontend: whether it lives, whether a request would succeed, who is there."""

from collections.abc import Callable, Mapping, Sequence

from components.discovery.book import InstanceBook
from components.messaging.heartbeats import Liveness
from components.openai.operations import Worker, WorkerList, WorkerLoad, WorkerState
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from services.frontend.ports import Mesh

ROLES: tuple[Role, ...] = ("frontend", "bootstrap", "decode", "prefill")

Condition = Callable[[], str | None]  # why a request would fail now; None: not for this reason


class Operations:
    """Of one frontend. All of it are looks into memory."""

    def __init__(
        self,
        mesh: Mesh,
        conditions: Sequence[Condition] = (),
        workers: Callable[[], WorkerList] = WorkerList,
    ) -> None:
        """`conditions`: beside that of an instance to ask."""
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


def workers_of(book: InstanceBook, alive: Mapping[Role, Liveness]) -> WorkerList:
    """Everyone in `book`, with the load that those tell whose heartbeats are followed."""
    return WorkerList(data=[_worker(record, alive.get(role)) for role in ROLES for record in book.of_role(role)])


def _worker(record: InstanceRecord, alive: Liveness | None) -> Worker:
    beat = None if alive is None else alive.last_heartbeat(record.instance_id)
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
        state=None if alive is None else _state(record, alive, beat),
        load=None if beat is None else WorkerLoad.model_validate(beat, from_attributes=True),
    )


def _state(record: InstanceRecord, alive: Liveness, beat: Heartbeat | None) -> WorkerState:
    if alive.is_lost(record.instance_id):
        return "silent"
    return "draining" if beat is not None and beat.draining else "up"
