"""The planner's view of the mesh: heartbeats of workers, and metrics pages of workers and frontends."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from components.credentials import PageAccess
from components.discovery.book import InstanceBook
from components.discovery.pages import page_of
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.fleet import show_instances
from components.messaging.liveness import Liveness, silent_after_s, watch_heartbeats
from components.planning.samples import PLANNED, FrontendSample, Observation, Planned, WorkerSample
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from services.planner.pages import PageReader, read_frontend, read_worker

log = logging.getLogger(__name__)


class _Heartbeats:
    """Heartbeats of one worker since the last observation."""

    def __init__(self, beat: Heartbeat, now_s: float) -> None:
        self.last = beat
        self.arrived_s = self._counted_s = self._observed_s = now_s
        self._waited_s = 0.0  # of all requests together

    def add(self, beat: Heartbeat, now_s: float) -> None:
        self._count(now_s)
        self.last, self.arrived_s = beat, now_s

    def mean_waiting(self, now_s: float) -> float:
        """Return the mean number of waiting requests since the last observation, and begin a new one."""
        self._count(now_s)
        passed_s = now_s - self._observed_s
        mean = self._waited_s / passed_s if passed_s else float(self.last.num_waiting)
        self._observed_s, self._waited_s = now_s, 0.0
        return mean

    def _count(self, now_s: float) -> None:
        self._waited_s += (now_s - self._counted_s) * self.last.num_waiting
        self._counted_s = now_s


class FleetSampler:
    def __init__(
        self,
        book: InstanceBook,
        liveness: Mapping[Planned, Liveness],
        clock: Callable[[], float] = time.monotonic,
        access: PageAccess = PageAccess(),  # noqa: B008 - a frozen value
    ) -> None:
        self._book = book
        self._liveness = liveness
        self._clock = clock
        self._pages = PageReader(access)
        self._heartbeats: dict[tuple[str, str], _Heartbeats] = {}  # by role and instance id
        self._warned: set[tuple[str, str, str]] = set()  # role, instance id, cause
        for role, of_role in liveness.items():
            of_role.on_heartbeat(partial(self._receive, role))

    def _receive(self, role: Planned, beat: Heartbeat) -> None:
        key, now_s = (role, beat.instance_id), self._clock()
        if (known := self._heartbeats.get(key)) is None:
            self._heartbeats[key] = _Heartbeats(beat, now_s)
        else:
            known.add(beat, now_s)

    def show(self, metrics: CollectorRegistry) -> None:
        show_instances(metrics, *self._liveness.values())

    def ages_s(self) -> dict[str, float]:
        """Return the age of the latest heartbeat, by instance id; the older one if two workers have the same id."""
        ages: dict[str, float] = {}
        for of_role in self._liveness.values():
            for instance_id, age_s in of_role.ages_s().items():
                ages[instance_id] = max(age_s, ages.get(instance_id, age_s))
        return ages

    async def observe(self, wanted: Mapping[Planned, int]) -> Observation:
        """Instances that do not answer are listed as unknown."""
        unknown: list[str] = []
        records = {role: self._book.of_role(role) for role in PLANNED}
        seen_frontends = self._book.of_role("frontend")
        workers, frontends = await asyncio.gather(
            asyncio.gather(*(self._workers(role, records[role], unknown) for role in PLANNED)),
            asyncio.gather(*(self._frontend(record, unknown) for record in seen_frontends)),
        )
        known = {
            (record.role, record.instance_id) for record in [*records["prefill"], *records["decode"], *seen_frontends]
        }
        self._heartbeats = {key: beats for key, beats in self._heartbeats.items() if key in known}
        self._warned = {warned for warned in self._warned if warned[:2] in known}
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
        beats, url = self._heartbeats.get((record.role, record.instance_id)), page_of(record)
        silent = (
            beats is None
            or beats.last.epoch != record.epoch
            or self._clock() - beats.arrived_s > silent_after_s(beats.last.next_s)
        )
        if beats is None or silent or url is None or record.instance_id not in alive:
            unknown.append(record.instance_id)
            return None
        try:
            counters = await self._pages.read(url, read_worker)
        except MeshError as exc:
            self._unread(record, exc, unknown)
            return None
        beat = beats.last
        return WorkerSample(
            instance_id=record.instance_id,
            busy_s=counters.busy_s,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            accepted=beat.accepted,
            queued_tokens=beat.queued_tokens,
            waiting=beats.mean_waiting(self._clock()),
            used_pages=beat.total_pages - beat.free_pages - beat.cached_pages,
            total_pages=beat.total_pages,
            draining=beat.draining,
            devices=1 if record.kv is None else len(record.kv.devices),
        )

    async def _frontend(self, record: InstanceRecord, unknown: list[str]) -> FrontendSample | None:
        try:
            return await self._pages.read(page_of(record) or "", partial(read_frontend, record.instance_id))
        except MeshError as exc:
            self._unread(record, exc, unknown)
            return None

    def _unread(self, record: InstanceRecord, exc: MeshError, unknown: list[str]) -> None:
        unknown.append(record.instance_id)
        warned = (record.role, record.instance_id, exc.message)
        if warned in self._warned:
            return
        self._warned.add(warned)
        log.warning(
            "a metrics page cannot be read, so no worker is removed: set MESH_METRICS_HOST of the instance to an address "
            "that the planner can reach, and the same MESH_METRICS_LOGIN_FILE for both",
            extra={"role": record.role, "instance": record.instance_id, "cause": exc.message},
        )


@asynccontextmanager
async def open_fleet_sampler(
    bus: Bus, namespace: str, book: InstanceBook, access: PageAccess
) -> AsyncIterator[FleetSampler]:
    async with (
        watch_heartbeats(bus, namespace, "prefill", book) as prefills,
        watch_heartbeats(bus, namespace, "decode", book) as decodes,
    ):
        yield FleetSampler(book, {"prefill": prefills, "decode": decodes}, access=access)
