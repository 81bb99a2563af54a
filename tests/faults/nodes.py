"""The four services as their `__main__` wires them, each a process of one event loop; only the edges are in memory."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from components.aio import background
from components.discovery.registry import Registration
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.multi_rank_transfer import MultiRankTransfer
from components.kv_transfer.writes import Writes
from components.messaging.bus import Bus
from components.messaging.call_server import serve_calls
from components.messaging.fan_out import MIN_INTERVAL_S, SubscriptionChoice
from components.messaging.fleet import Fleet, open_fleet
from components.messaging.heartbeat_sender import HeartbeatSender
from components.messaging.inbox import open_inbox
from components.messaging.kv_publisher import KvEventPublisher
from components.messaging.outbox import StreamOutbox
from components.messaging.presence import keep_present, present_endpoint
from components.process import drain, give_up, subject_of
from components.routing.policies import DEFAULT, PolicyName, WorkerRole
from components.telemetry.worker_metrics import WorkerMetrics
from components.text.tokenizer import TextModel
from components.wire.codec import OLDEST, PROTOCOL
from components.wire.instances import InstanceRecord, KvEndpoint, Role
from engine.config import EngineConfig, MockConfig
from engine.core.engine_core import EngineCore
from engine.loop.inline_loop import InlineLoop
from engine.mock.mock_engine import build_engine
from engine.model.resolve import model_dir
from engine.parallel.rank_processes import RankLost
from engine.ports import max_request_pages
from engine.runner.step_runner import StepFailed
from engine.scheduler.request import Request, RequestState
from services.bootstrap.service import BootstrapService
from services.decode.prefill_client import PrefillClient
from services.decode.requests import ActiveRequests
from services.decode.runner import RequestRunner
from services.decode.service import DecodeService
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.mesh_client import MeshClient
from services.prefill.service import PrefillService
from tests.faults.memory_etcd import MemoryEtcd, MemoryRegistry
from tests.faults.memory_nats import MemoryClient, MemoryNats
from tests.faults.memory_ranks import MemoryRank, open_ranks
from tests.faults.memory_transfer import Fabric, MemoryTransfer
from tests.faults.setup import Setup
from tests.faults.virtual_loop import Process, Running
from tests.services.fake_masks import FakeMasks

NAMESPACE: Final = "mesh"
MODEL: Final = "mock"
TRANSFER_TIMEOUT_S: Final = 8.0
LEASE_TTL_S: Final = 6.0
DRAIN_TIMEOUT_S: Final = 5.0
NOTICES_S: Final = 0.3
ROOM_CLEANUP_S: Final = 1.0
CLIENT_LIFE_S: Final = 25.0
HEAD_DIM: Final = 8
# how the runs of these tests name some of the workers' counters
COUNTERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "failures": ("kvmesh_kv_transfers_total", {"outcome": "failed"}),
    "corrupt": ("kvmesh_kv_transfers_total", {"outcome": "failed", "cause": "KvCorrupt"}),
    "bytes": ("kvmesh_kv_transfer_bytes_total", {}),
    "restored": ("kvmesh_kv_restored_pages_total", {}),
    "recomputes": ("kvmesh_prompts_computed_on_decode_total", {"reason": "transfer_failed"}),
}


def make_engine(
    home: Path,
    page_size: int,
    adapters: dict[str, str],
    pool_tokens: int,
    *,
    pipeline: bool = False,
    step_s: float = 0.0,
    ranks: int = 1,
    kv_heads: int = 1,
    window: int | None = None,
    offloaded_tokens: int = 0,
) -> EngineCore:
    """One that answers as every worker of these meshes does. A step that computes takes `step_s`."""
    token_bytes = 2 * 2 * HEAD_DIM * -(-kv_heads // ranks)  # of a rank: K and V in bfloat16
    config = EngineConfig(
        page_size=page_size,
        num_pages=pool_tokens // page_size,
        kv_offload_gb=(offloaded_tokens * token_bytes + 1) / 1e9 if offloaded_tokens else None,
        max_running=8,
        max_step_tokens=40,
        reserve_tokens=16,
        lora=adapters,
        tensor_parallel=ranks,
        pipeline="on" if pipeline else "off",
        mock=MockConfig(
            step_s=step_s,
            decode_s=0.0,
            context_token_s=0.0,
            prompt_token_s=0.0,
            layers=1,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            answer_tokens=64,
            window=window,
        ),
    )
    return build_engine(MODEL, config, home)


@cache
def text_model(home: Path) -> TextModel:
    """The tokenizer of every frontend."""
    return TextModel.load(found_model(MODEL, home))


@cache
def found_model(model: str, home: Path, _progress: object = None) -> Path:
    """See `engine.model.resolve.model_dir`, which would look at the files each time."""
    return model_dir(model, home)


class Cluster:
    """What all processes share."""

    def __init__(
        self,
        nats: MemoryNats,
        etcd: MemoryEtcd,
        fabric: Fabric,
        home: Path,
        setup: Setup,
        prefill_client: Callable[..., PrefillClient] = PrefillClient,
    ) -> None:
        self.nats, self.etcd, self.fabric, self.home, self.setup = nats, etcd, fabric, home, setup
        self.prefill_client = prefill_client


class Node(ABC):
    """One process of the mesh."""

    role: Role

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.id = instance_id = f"{self.role}{number}"
        self.adapters = cluster.setup.adapters_of(self.role, number)
        self.cluster = cluster
        self.process = Process(instance_id)
        self.bus = Bus(MemoryClient(cluster.nats, self.process), "memory")
        self.registration = Registration(instance_id, f"{cluster.etcd.random.getrandbits(32):08x}")
        self.subject = subject_of(NAMESPACE, self.role, instance_id)
        self.ready = asyncio.Event()
        self.leave = asyncio.Event()
        self.idle_tasks: list[str] = []  # of this process when it has nothing to do
        self.registry: MemoryRegistry
        self.task = self.process.spawn(self._main(), "main")

    @property
    def processes(self) -> list[Process]:
        """With those of its followers."""
        return [self.process]

    def kill(self) -> None:
        """Its followers end with it."""
        for process in self.processes:
            process.state = Running.DEAD

    def leftovers(self) -> list[str]:
        """What it keeps that it would not keep if nothing had ever been asked of it."""
        tasks = self._tasks()
        left = [f"task {name}" for name in tasks]
        for name in self.idle_tasks:
            if f"task {name}" in left:
                left.remove(f"task {name}")
        return [f"{self.id}: {what}" for what in [*left, *self._kept()]]

    def settled(self) -> None:
        """What runs now is what runs when there is nothing to do."""
        self.idle_tasks = self._tasks()

    async def _main(self) -> None:
        self.registry = MemoryRegistry(self.cluster.etcd, self.process)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.bus.answers())
            await self._serve(stack)
            self.ready.set()
            await self._until_over()
            await self._drain()

    @abstractmethod
    async def _serve(self, stack: AsyncExitStack) -> None:
        """Open what this process has, for as long as `stack` is."""

    async def _until_over(self) -> None:
        """Wait until this process gets the signal to leave."""
        await self.leave.wait()

    async def _drain(self) -> None:
        """Before it leaves; most have nothing to wait for."""
        return

    def _kept(self) -> list[str]:
        return []

    def _tasks(self) -> list[str]:
        coroutines = (task.get_coro() for task in self.process.live_tasks())
        return sorted(getattr(coroutine, "__qualname__", repr(coroutine)) for coroutine in coroutines)

    def _record(self, kv: KvEndpoint | None = None, max_context: int | None = None) -> Callable[[str], InstanceRecord]:
        def make(epoch: str) -> InstanceRecord:
            return InstanceRecord(
                instance_id=self.id,
                epoch=epoch,
                role=self.role,
                host="memory",
                pid=1,
                started_unix_ms=0,
                subject=self.subject,
                model=None if self.role == "bootstrap" else MODEL,
                adapters=self.adapters if kv is not None else {},
                max_context=max_context,
                kv=kv,
                kv_events=kv is not None,
                protocol=PROTOCOL,
                oldest_protocol=OLDEST,
            )

        return make

    def _watch(
        self, role: WorkerRole, policy: PolicyName, following: SubscriptionChoice | None = None
    ) -> AbstractAsyncContextManager[Fleet]:
        """Draws are the same in each run."""
        book = self.registry.book
        return open_fleet(self.bus, NAMESPACE, role, book, policy, rng=Random(self.id), following=following)

    @asynccontextmanager
    async def _advertised(
        self, endpoints: list[Any], make_record: Callable[[str], InstanceRecord]
    ) -> AsyncIterator[None]:
        async with (
            keep_present(self.bus, self.registry.book, Random(self.id)),
            serve_calls(self.bus, self.role, self.subject, [*endpoints, present_endpoint(self.registration)], {}),
            self.registry.advertise(self.registration, make_record),
        ):
            yield


class Frontend(Node):
    """Without a socket: clients call `app`, or read `mesh` themselves."""

    role: Role = "frontend"
    mesh: MeshClient
    app: FastAPI

    async def _serve(self, stack: AsyncExitStack) -> None:
        decodes = await stack.enter_async_context(self._watch("decode", DEFAULT["decode"]))
        self.inbox = await stack.enter_async_context(open_inbox(self.bus, f"{self.subject}.tokens"))
        self.mesh = MeshClient(self.bus, self.inbox, decodes, MODEL)
        if self.cluster.setup.http:
            settings = FrontendSettings(request_timeout_s=CLIENT_LIFE_S)
            self.app = create_app(self.mesh, text_model(self.cluster.home), settings)
        await stack.enter_async_context(self._advertised([], self._record()))

    def _kept(self) -> list[str]:
        return [f"{len(self.inbox)} streams"] if len(self.inbox) else []


class BuiltHere(InlineLoop):
    """The engine's loop as the mock's is, but for the thread that builds it."""

    @property
    def core(self) -> EngineCore:
        assert isinstance(self._engine, EngineCore)
        return self._engine

    async def start(self) -> None:
        self._engine = self._build()
        self._receive(self._engine.step())


class Worker(Node):
    """A process with an engine."""

    engine: "BuiltHere"
    memory: MemoryTransfer  # of rank 0
    transfer: KvTransfer
    writes: Writes
    ranks: Sequence[MemoryRank] = ()
    heart: HeartbeatSender
    service: Any
    died: BaseException | None = None  # what its engine died of

    async def _start_engine(self, stack: AsyncExitStack) -> None:
        self.metrics = WorkerMetrics()
        self.engine = BuiltHere(self._make_engine)
        await self.engine.start()
        stack.push_async_callback(self.engine.stop)
        engine = self.engine.engine
        region, pages, fabric = engine.kv_region, max_request_pages(engine), self.cluster.fabric
        self.memory = MemoryTransfer(
            fabric, region, pages, self.id, self.process, self._exposed_for, seals=self.cluster.setup.seals
        )
        stack.callback(self.memory.close)
        self.transfer, self.writes = self.memory, Writes(self.memory)
        if region.followers:
            numbers = range(1, 1 + len(region.followers))
            self.ranks = [MemoryRank(i, self.id, fabric, self._exposed_for) for i in numbers]
            for rank in self.ranks:
                stack.push_async_callback(rank.end)
            connections = [rank.connection for rank in self.ranks]
            self.transfer = MultiRankTransfer(
                self.memory, connections, await open_ranks(self.ranks, region, self.id, pages)
            )
            self.writes = Writes(self.transfer, connections)
        self.kv_events = await stack.enter_async_context(
            KvEventPublisher(self.bus, self.subject, self.id, lambda: self.registration.epoch).running()
        )
        self.engine.on_output(lambda output: self.kv_events.record(output.cache_events))

    def _make_engine(self) -> EngineCore:
        setup = self.cluster.setup
        return make_engine(
            self.cluster.home,
            setup.page_size(self.role),
            self.adapters,
            setup.pool_tokens,
            pipeline=setup.pipeline,
            step_s=setup.prefill_step_s if self.role == "prefill" else setup.decode_step_s,
            ranks=setup.num_ranks(self.role),
            kv_heads=setup.kv_heads,
            window=setup.window,
            offloaded_tokens=setup.offloaded_tokens,
        )

    @property
    def processes(self) -> list[Process]:
        return [self.process, *(rank.process for rank in self.ranks)]

    def lose_rank(self) -> None:
        """kill -9 of a follower. Its leader may be busy before it ends."""
        rank = self.ranks[-1]
        rank.kill()
        loop = asyncio.get_running_loop()
        loop.call_later(NOTICES_S, self.engine._end, RankLost("injected"), context=self.process.context())

    def fail_steps(self) -> None:
        """All steps fail from now on, as on a device without memory."""

        def launch(_chunks: object) -> None:
            raise StepFailed("injected")

        self.engine.core._runner.launch = launch  # type: ignore[method-assign, assignment]

    def count(self, name: str) -> float:
        """What one of COUNTERS says."""
        sample, labels = COUNTERS[name]
        samples = (one for family in self.metrics.registry.collect() for one in family.samples)
        return sum(one.value for one in samples if one.name == sample and labels.items() <= one.labels.items())

    def _exposed_for(self, page: int) -> Request | None:
        """The request to whose transfer this page is exposed."""
        exposed = (RequestState.RESERVED, RequestState.HELD)
        return next((r for r in self.engine.core._requests if page in r.pages and r.state in exposed), None)

    async def _until_over(self) -> None:
        """A process whose engine dies leaves too."""

        async def watch() -> None:
            self.died = await self.engine.failed()
            self.leave.set()

        async with background(watch(), "engine-failed"):
            await self.leave.wait()

    async def _main(self) -> None:
        await super()._main()
        if self.died is not None:  # nothing was waited for: as at the end of a process
            while tasks := [task for task in self.process.live_tasks() if task is not asyncio.current_task()]:
                for task in tasks:  # one that is cancelled may begin another one
                    task.cancel()
                await asyncio.sleep(0)

    async def _drain(self) -> None:
        if self.died is None:
            await drain(self.service, DRAIN_TIMEOUT_S, self.heart.send_now)
        else:
            await give_up(self.service, self.heart.send_now)

    def _kept(self) -> list[str]:
        core = self.engine.core
        core._memory.pool.check()
        counts = {
            "pages held": core._memory.pool.num_held,
            "requests waiting": len(core._scheduler.waiting),
            "requests running": len(core._scheduler.running),
            "requests reserved": len(core._scheduler.reserved),
            "requests known": len(list(core._requests)),
            "aux slots taken": self.transfer.aux.num_slots - self.transfer.aux.num_free,
            "notifications expected": len(self.memory.expected),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


class Decode(Worker):
    role: Role = "decode"

    async def _serve(self, stack: AsyncExitStack) -> None:
        await self._start_engine(stack)
        following = SubscriptionChoice(self.registry.book, 0 if self.cluster.setup.asks else None)
        prefills = await stack.enter_async_context(self._watch("prefill", DEFAULT["prefill"], following))
        outbox = await stack.enter_async_context(
            StreamOutbox(self.bus, self.id, lambda: self.registration.epoch, lambda: self.engine.stats.step).running()
        )
        setup = self.cluster.setup
        self.prefill_client = self.cluster.prefill_client(
            self.bus,
            self.registration,
            self.registry,
            self.transfer,
            TRANSFER_TIMEOUT_S,
            bootstrap_timeout_s=TRANSFER_TIMEOUT_S,
            checksums=PageChecksums(self.engine.engine.kv_region, self.writes.connections) if setup.verify_kv else None,
            recomputes=setup.on_transfer_failure == "recompute",
        )
        self.active = ActiveRequests(outbox)
        masks: Any = FakeMasks()
        self.runner = RequestRunner(
            self.engine,
            self.prefill_client,
            prefills,
            self.active,
            masks=masks,
            metrics=self.metrics,
            model=MODEL,
            max_local_prefill=16,
            on_transfer_failure=setup.on_transfer_failure,
            local_prefill_on_queue=setup.local_prefill_on_queue,
        )
        self.service = DecodeService(self.registration, self.runner, model=MODEL, metrics=self.metrics)
        record = self._record(self.transfer.endpoint, self.engine.engine.max_context)
        await stack.enter_async_context(
            self._advertised([*self.service.endpoints(), *self.kv_events.endpoints()], record)
        )
        heartbeats = HeartbeatSender(self.bus, self.subject, self.service.heartbeat, lambda: MIN_INTERVAL_S).running()
        self.heart = heart = await stack.enter_async_context(heartbeats)
        self.engine.on_output(lambda output: heart.stepped(output.stats.step))

    def _kept(self) -> list[str]:
        counts = {
            "streams": len(self.active),
            "transfers": len(self.prefill_client),
            "tasks of requests": len(self.runner._tasks),
            "transfers to settle": len(self.runner._remote._settling),
        }
        return [*super()._kept(), *(f"{count} {what}" for what, count in counts.items() if count)]


class Prefill(Worker):
    role: Role = "prefill"

    async def _serve(self, stack: AsyncExitStack) -> None:
        await self._start_engine(stack)
        masks: Any = FakeMasks()
        self.service = PrefillService(
            self.bus,
            self.registration,
            self.registry,
            self.engine,
            self.transfer,
            masks=masks,
            metrics=self.metrics,
            writes=self.writes,
            bootstrap_timeout_s=inf,
        )
        record = self._record(self.transfer.endpoint)
        await stack.enter_async_context(
            self._advertised([*self.service.endpoints(), *self.kv_events.endpoints()], record)
        )
        heartbeats = HeartbeatSender(
            self.bus, self.subject, self.service.heartbeat, lambda: MIN_INTERVAL_S, self.kv_events.log.num_cached
        ).running()
        self.heart = heart = await stack.enter_async_context(heartbeats)
        self.engine.on_output(lambda output: heart.stepped(output.stats.step))

    def _kept(self) -> list[str]:
        transfers = self.service.num_transfers
        return [*super()._kept(), *([f"{transfers} transfers"] if transfers else [])]


class Bootstrap(Node):
    role: Role = "bootstrap"

    async def _serve(self, stack: AsyncExitStack) -> None:
        self.service = BootstrapService(self.bus, NAMESPACE, self.registration, CollectorRegistry())
        await stack.enter_async_context(background(self.service.clean(ROOM_CLEANUP_S), "clean-rooms"))
        await stack.enter_async_context(self._advertised(self.service.endpoints(), self._record()))

    def _kept(self) -> list[str]:
        rooms = len(self.service)
        return [f"{rooms} rooms"] if rooms else []


NODES: Final[dict[str, type[Node]]] = {
    "frontend": Frontend,
    "decode": Decode,
    "prefill": Prefill,
    "bootstrap": Bootstrap,
}
