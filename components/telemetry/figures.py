"""A process's figures, read when its status or metrics page is requested."""

import heapq
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from components.lifecycle import Lifecycle, S
from components.telemetry.links import Links
from components.telemetry.recent import LoopProbe
from components.version import VERSION
from components.wire.status import PageStatus, RoomStatus, Status, TransportStatus

MAX_ROOMS: Final = 200  # in a status
_STARTED_S: Final = time.monotonic()


class Queue(NamedTuple):
    length: int = 0
    oldest_s: float = 0.0  # the oldest item's age


def queues_of(lifecycles: Iterable[Lifecycle[S]], states: Iterable[S]) -> dict[str, Queue]:
    now_s = time.monotonic()
    lengths: dict[str, int] = dict.fromkeys(map(str, states), 0)
    oldest: dict[str, float] = dict.fromkeys(lengths, 0.0)
    for one in lifecycles:
        state = str(one.state)
        if state in lengths:
            lengths[state] += 1
            oldest[state] = max(oldest[state], now_s - one.entered_s)
    return {state: Queue(length, oldest[state]) for state, length in lengths.items()}


class Batch(NamedTuple):
    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Figures:
    """Sources of figures. Each part of the process sets its own; a role without it keeps the default."""

    role: str
    instance_id: str
    model: str = ""
    layout: str = ""
    kv_transfer: str = ""
    kv_transport: str = ""
    traces_per_s: float = 0.0
    epoch: Callable[[], str] = str
    is_draining: Callable[[], bool] = bool
    etcd_contact_age_s: Callable[[], float] = float
    nats_contact_age_s: Callable[[], float] = float
    queues: Callable[[], Mapping[str, Queue]] | None = None
    rooms: Callable[[], Iterable[RoomStatus]] = tuple
    pages: Callable[[], PageStatus | None] = lambda: None
    batch: Callable[[], Batch] = Batch
    breakers: Callable[[], Mapping[str, str]] | None = None  # state by instance id
    heartbeat_ages_s: Callable[[], Mapping[str, float]] | None = None  # by instance id
    transport: Callable[[], TransportStatus] | None = None  # workers only; it blocks, and may raise OSError
    links: Links = field(default_factory=Links)
    loop: LoopProbe = field(default_factory=LoopProbe)  # its total counts tokens

    def status(self) -> Status:
        queues = {} if self.queues is None else self.queues()
        rooms = list(self.rooms())
        batch = self.batch()
        return Status(
            instance_id=self.instance_id,
            role=self.role,
            epoch=self.epoch(),
            model=self.model,
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            uptime_s=time.monotonic() - _STARTED_S,
            now_unix_s=time.time(),
            draining=self.is_draining(),
            log_level=logging.getLevelName(logging.getLogger().level).lower(),
            traces_per_s=self.traces_per_s,
            event_loop_lag_s=self.loop.worst_lag_s,
            etcd_contact_age_s=self.etcd_contact_age_s(),
            nats_contact_age_s=self.nats_contact_age_s(),
            layout=self.layout,
            kv_transfer=self.kv_transfer,
            kv_transport=self.kv_transport,
            queues={state: queue.length for state, queue in queues.items()},
            oldest_queued_s={state: queue.oldest_s for state, queue in queues.items() if queue.length},
            rooms=heapq.nlargest(MAX_ROOMS, rooms, key=lambda room: room.age_s),
            num_rooms=len(rooms),
            links=self.links.shown(),
            pages=self.pages(),
            running=batch.running,
            waiting=batch.waiting,
            tokens_per_s=self.loop.per_s,
            breakers={} if self.breakers is None else dict(self.breakers()),
            heartbeat_ages_s={} if self.heartbeat_ages_s is None else dict(self.heartbeat_ages_s()),
        )
