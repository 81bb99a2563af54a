"""What the planner sees: heartbeats of workers, and the pages of workers and frontends, all at one moment."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from components.discovery.book import InstanceBook
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.heartbeats import Liveness, silent_after_s, watch_heartbeats
from components.planning.samples import PLANNED, FrontendSample, Observation, Planned, WorkerSample
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from services.planner.http import get
from services.planner.pages import page_of, read_frontend, read_worker

log = logging.getLogger(__name__)


class _Heard:
    """Heartbeats of one worker."""

    def __init__(self, beat: Heartbeat, now_s: float) -> None:
        self.last = beat
        self.heard_s = self._counted_s = self._looked_s = now_s
        self._waited_s = 0.0  # by all requests together, since the last look

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Its next one."""
        self._count(now_s)
        self.last, self.heard_s = beat, now_s

    def mean_waiting(self, now_s: float) -> float:
        """Requests that wait, on average over the time since the last look, which this is from now on."""
        self._count(now_s)
        passed_s = now_s - self._looked_s
        mean = self._waited_s / passed_s if passed_s else float(self.last.num_waiting)
        self._looked_s, self._waited_s = now_s, 0.0
        return mean

    def _count(self, now_s: float) -> None:
        """What it said last was so until now."""
        self._waited_s += (now_s - self._counted_s) * self.last.num_waiting
        self._counted_s = now_s


class Observer:
    """Sees the mesh when asked."""

    def __init__(
        self,
        book: InstanceBook,
        liveness: Mapping[Planned, Liveness],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._liveness = liveness
        self._clock = clock
        self._pulses: dict[str, _Heard] = {}
        for of_role in liveness.values():
            of_role.on_heard(self._hear)

    def _hear(self, beat: Heartbeat) -> None:
        now_s = self._clock()
        if (known := self._pulses.get(beat.instance_id)) is None:
            self._pulses[beat.instance_id] = _Heard(beat, now_s)
        else:
            known.hear(beat, now_s)

    async def observe(self, wanted: Mapping[Planned, int]) -> Observation:
        """Now; instances that do not answer are named as unknown."""
        unknown: list[str] = []
        records = {role: self._book.of_role(role) for role in PLANNED}
        workers, frontends = await asyncio.gather(
            asyncio.gather(*(self._workers(role, records[role], unknown) for role in PLANNED)),
            asyncio.gather(*(self._frontend(record, unknown) for record in self._book.of_role("frontend"))),
        )
        known = {record.instance_id for role in PLANNED for record in records[role]}
        self._pulses = {name: pulse for name, pulse in self._pulses.items() if name in known}
        return Observation(
            at_s=self._clock(),
            wanted=wanted,
            workers=dict(zip(PLANNED, workers, strict=True)),
            frontends=[frontend for frontend in frontends if frontend is not None],
            unknown=unknown,
        )

    async def _workers(self, role: Planned, records: list[InstanceRecord], unknown: list[str]) -> list[WorkerSample]:
        alive = {r.instance_id for r in records if not self._liveness[role].is_lost(r.instance_id)}
        samples = await asyncio.gather(*(self._worker(record, alive, unknown) for record in records))
        return [sample for sample in samples if sample is not None]

    async def _worker(self, record: InstanceRecord, alive: set[str], unknown: list[str]) -> WorkerSample | None:
        pulse, url = self._pulses.get(record.instance_id), page_of(record)
        silent = (
            pulse is None
            or pulse.last.epoch != record.epoch
            or self._clock() - pulse.heard_s > silent_after_s(pulse.last.next_s)
        )
        if pulse is None or silent or url is None or record.instance_id not in alive:
            unknown.append(record.instance_id)
            return None
        try:
            counters = read_worker(await get(url))
        except MeshError as exc:
            log.debug("page not read", extra={"instance": record.instance_id, "cause": exc.message})
            unknown.append(record.instance_id)
            return None
        beat = pulse.last
        return WorkerSample(
            instance_id=record.instance_id,
            busy_s=counters.busy_s,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            accepted=beat.accepted,
            queued_tokens=beat.queued_tokens,
            running=beat.num_running,
            waiting=pulse.mean_waiting(self._clock()),
            used_pages=beat.total_pages - beat.free_pages - beat.cached_pages,
            total_pages=beat.total_pages,
            draining=beat.draining,
        )

    async def _frontend(self, record: InstanceRecord, unknown: list[str]) -> FrontendSample | None:
        try:
            return read_frontend(record.instance_id, await get(page_of(record) or ""))
        except MeshError as exc:
            log.debug("page not read", extra={"instance": record.instance_id, "cause": exc.message})
            unknown.append(record.instance_id)
            return None


@asynccontextmanager
async def open_observer(bus: Bus, namespace: str, book: InstanceBook) -> AsyncIterator[Observer]:
    """An observer that hears heartbeats while inside."""
    async with (
        watch_heartbeats(bus, namespace, "prefill", book) as prefills,
        watch_heartbeats(bus, namespace, "decode", book) as decodes,
    ):
        yield Observer(book, {"prefill": prefills, "decode": decodes})
