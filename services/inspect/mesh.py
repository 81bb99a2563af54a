"""Queries the status of all instances of a mesh at once."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from components.discovery.etcd import NotAllowed
from components.discovery.registry import Registry, check_readable, join_registry
from components.errors import BackendUnavailable, MeshError
from components.local_mesh import local_mesh, no_answer_advice
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.messaging.micro_services import OTHERS_TIMEOUT_S, find_services
from components.settings import MeshSettings
from components.urls import without_password
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from components.wire.status import Status, StatusRequest

T = TypeVar("T")

CONNECT_S: Final = 8.0
STATUS_S: Final = 3.0  # for an answer
PING_S: Final = 0.25  # for planners' answers, which a screen's refresh waits for
PLANNERS_S: Final = 10.0  # between two searches for planners: etcd has no records of them
WORKERS: Final[tuple[Role, ...]] = ("decode", "prefill")
ROLES: Final[tuple[Role, ...]] = ("frontend", "bootstrap", *WORKERS)


@dataclass(frozen=True, slots=True)
class Clock:
    """An instance's wall clock relative to ours."""

    ahead_s: float
    uncertain_s: float  # half the time of the call


@dataclass(frozen=True, slots=True)
class Seen:
    role: str
    instance_id: str
    subject: str
    record: InstanceRecord | None = None  # None: a planner
    status: Status | None = None  # None: no answer
    clock: Clock | None = None


class Mesh:
    def __init__(self, bus: Bus, registry: Registry, namespace: str) -> None:
        self.bus = bus
        self.book = registry.book
        self._registry = registry
        self.namespace = namespace
        self._planners: dict[str, str] = {}  # subjects by instance id
        self._planners_at_s = -math.inf  # monotonic, of the latest question

    def follows_etcd(self) -> bool:
        return self._registry.connected

    def records(self) -> list[InstanceRecord]:
        return [record for role in ROLES for record in self.book.of_role(role)]

    async def instances(self) -> list[Seen]:
        """Return all instances, without status. Raises: MeshError, if no search for planners has ever succeeded."""
        if time.monotonic() - self._planners_at_s > PLANNERS_S:
            try:
                self._planners = await planners(self.bus, self.namespace, PING_S)
            except MeshError:
                if self._planners_at_s == -math.inf:
                    raise
            self._planners_at_s = time.monotonic()
        seen = [Seen(r.role, r.instance_id, r.subject, r) for r in self.records()]
        return seen + [Seen("planner", instance_id, subject) for instance_id, subject in self._planners.items()]

    async def snapshot(self, *, transport: bool = False, wait_s: float = STATUS_S) -> list[Seen]:
        """Return all instances, with the status of those that answer within `wait_s`. `transport`: query connections, too."""
        asked = StatusRequest(transport=transport)
        return list(await asyncio.gather(*(self._ask(one, asked, wait_s) for one in await self.instances())))

    async def _ask(self, one: Seen, asked: StatusRequest, wait_s: float) -> Seen:
        began_s, asked_s = time.time(), time.monotonic()
        try:
            status = await self.bus.call(f"{one.subject}.status", asked, Status, timeout_s=wait_s)
        except MeshError:
            return one
        took_s = time.monotonic() - asked_s
        clock = Clock(status.now_unix_s - (began_s + took_s / 2), took_s / 2)
        return Seen(one.role, one.instance_id, one.subject, one.record, status, clock)


def open_bus(settings: MeshSettings) -> AbstractAsyncContextManager[Bus]:
    """Connect to NATS only, for a command that does not need etcd."""
    where, failures = f"NATS at {without_password(settings.nats_url)}", deque[Exception](maxlen=1)
    bus = connect_bus(settings.nats_url, "inspect", settings.nats_access("inspect"), failures.append)
    return _opened(settings, where, bus, failures)


@asynccontextmanager
async def open_mesh(settings: MeshSettings) -> AsyncIterator[Mesh]:
    where = f"etcd at {without_password(settings.etcd_url)}"
    async with open_bus(settings) as bus, _opened(settings, where, _readable_registry(settings)) as registry:
        yield Mesh(bus, registry, settings.namespace)


@asynccontextmanager
async def _readable_registry(settings: MeshSettings) -> AsyncIterator[Registry]:
    """Open the registry. Raises: SystemExit, if this user may not read the namespace; a service would wait instead."""
    url, namespace, access = settings.etcd_url, settings.namespace, settings.etcd_access()
    try:
        await asyncio.to_thread(check_readable, url, namespace, access)
    except NotAllowed as exc:
        here = local_mesh(settings.home).get("namespace")
        other = f"this user may not read namespace {namespace!r}; the mesh that runs here is {here!r}"
        raise SystemExit(exc.message if here in (None, namespace) else other) from None
    except BackendUnavailable:
        pass  # the registry tries again
    async with join_registry(url, namespace, settings.lease_ttl_s, access) as registry:
        yield registry


@asynccontextmanager
async def _opened(
    settings: MeshSettings,
    where: str,
    connection: AbstractAsyncContextManager[T],
    failures: Sequence[Exception] = (),
) -> AsyncIterator[T]:
    """Open a connection. Exit with one line if this takes longer than CONNECT_S, or for a MeshError, even in the body.

    The line has `failures`, the errors of the attempts so far.
    """
    try:
        async with asyncio.timeout(CONNECT_S) as limit, connection as opened:
            limit.reschedule(None)
            yield opened
    except TimeoutError:
        cause = "".join(f" ({str(failure) or type(failure).__name__})" for failure in failures)
        raise SystemExit(f"no answer from {where}{cause}: {no_answer_advice(settings)}") from None
    except MeshError as exc:
        raise SystemExit(exc.message) from None


async def planners(bus: Bus, namespace: str, wait_s: float = OTHERS_TIMEOUT_S) -> dict[str, str]:
    """Return the subjects of the planners that answer, by instance id. Raises: MeshError."""
    found = await find_services(bus, "$SRV.PING.kvmesh-planner", namespace, wait_s=wait_s)
    return {one.metadata.instance_id: one.metadata.subject for one in found}


def heartbeat_ages_s(seen: Sequence[Seen]) -> Mapping[str, float]:
    """Return the age of each worker's latest heartbeat, by the instance that received the latest one."""
    ages: dict[str, float] = {}
    for one in seen:
        for instance_id, age_s in ({} if one.status is None else one.status.heartbeat_ages_s).items():
            ages[instance_id] = min(age_s, ages.get(instance_id, age_s))
    return ages


def state_of(one: Seen, heartbeat_age_s: float | None, silent_after_s: float) -> str:
    """Return `no answer`, `silent`, `draining`, `drained` or `ok`."""
    if heartbeat_age_s is not None and heartbeat_age_s > silent_after_s:
        return "silent"
    status = one.status
    if status is None:
        return "no answer"
    if status.draining:
        return "draining" if has_work(status) else "drained"
    return "ok"


def has_requests(beat: Heartbeat) -> bool:
    return bool(beat.num_running or beat.num_waiting or beat.num_requests or beat.num_held)


def has_work(status: Status) -> bool:
    return bool(status.running or status.waiting or status.num_rooms or any(status.queues.values()))
