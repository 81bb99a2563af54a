"""The parts of a worker process, for prefill and decode."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from components.aio import first, raises
from components.discovery.registry import Registration, Registry, join_registry
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.backends import known_transport, kv_opener, own_address
from components.kv_transfer.multi_rank_transfer import open_transfer
from components.kv_transfer.open_sockets import observed_transport
from components.kv_transfer.writes import Writes
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint, serve_calls
from components.messaging.connection import connect_bus
from components.messaging.fan_out import FleetSizes
from components.messaging.heartbeat_sender import HeartbeatSender, NumCached, none_cached
from components.messaging.kept_traces import follow_kept
from components.messaging.kv_publisher import KvEventPublisher
from components.messaging.presence import keep_present, present_endpoint
from components.messaging.profiles import Profiles, keep_profiles
from components.process import (
    Drainable,
    drain,
    give_up,
    new_instance_id,
    record_maker,
    settle,
    stop_signals,
    subject_of,
)
from components.process_control import Limit, ProcessControl
from components.process_health import measure, serve_health, status_endpoint
from components.routing.policies import WorkerRole
from components.settings import WorkerSettings
from components.structured.mask_maker import MaskMaker, open_masks
from components.structured.metrics import ConstraintMetrics
from components.telemetry.figures import Figures
from components.telemetry.logs import log_progress, log_ready
from components.telemetry.telemetry import start_telemetry
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.embed import EmbeddingModel
from components.wire.heartbeat import Heartbeat
from engine.config import EngineConfig
from engine.loop.engine_loop import EngineLoop
from engine.loop.profiler import EngineProfiler
from engine.model.resolve import model_dir, served_name
from engine.ports import max_request_pages
from engine.start import start_engine

log = logging.getLogger(__name__)

RANK: Final = "services.rank"


def model_name(settings: WorkerSettings) -> str:
    return settings.served_model_name or served_name(settings.model)


class WorkerService(Drainable, Protocol):
    def endpoints(self) -> list[Endpoint]: ...
    def heartbeat(self) -> Heartbeat: ...
    def show(self, figures: Figures) -> None: ...


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process whose parts are open. `serve` registers it."""

    role: WorkerRole
    instance_id: str
    subject: str
    settings: WorkerSettings
    config: EngineConfig
    registration: Registration
    metrics: WorkerMetrics
    figures: Figures
    bus: Bus
    registry: Registry
    engine: EngineLoop
    masks: MaskMaker
    transfer: KvTransfer
    writes: Writes
    kv_events: KvEventPublisher
    profiles: Profiles
    page: str  # URL of its metrics

    async def serve(
        self,
        service: WorkerService,
        drain_timeout_s: float,
        *,
        num_cached: NumCached = none_cached,
        max_context: int | None = None,
        embedding: EmbeddingModel | None = None,
    ) -> None:
        """Serve and stay registered until a stop signal, then drain. Raises: the engine's error, if it fails."""
        model, engine = model_name(self.settings), self.engine
        self.metrics.show_kv_events(lambda: self.kv_events.log.number, lambda: self.kv_events.log.dropped)
        self.metrics.show_ranks(self.config.tensor_parallel)
        self.metrics.show(self.figures)
        service.show(self.figures)
        engine.on_output(lambda output: self.kv_events.record(output.cache_events))
        size = self.config.step_size(self.transfer.endpoint.device)
        record = record_maker(
            self.settings,
            self.role,
            self.instance_id,
            model=model,
            adapters=engine.engine.adapters,
            max_context=max_context,
            kv=self.transfer.endpoint,
            http=self.page,
            kv_events=self.config.kv_events,
            embedding=embedding,
            max_running=size.requests,
            max_step_tokens=size.tokens,
        )
        interval_s = partial(FleetSizes(self.registry.book).heartbeat_rest_s, self.role)
        facts = {"instance_id": self.instance_id, "model": model}
        control = ProcessControl(self.figures)
        endpoints = [*self._endpoints(service), control.endpoint()]
        async with (
            serve_calls(self.bus, self.role, self.subject, endpoints, facts),
            HeartbeatSender(self.bus, self.subject, service.heartbeat, interval_s, num_cached).running() as heart,
            stop_signals() as stopped,
            self.registry.advertise(self.registration, record),
        ):
            engine.on_output(lambda output: heart.stepped(output.stats.step))
            control.serves(service, heart.send_now, Limit(drain_timeout_s, service.stop_all))
            settle()
            log_ready(instance=self.instance_id, model=model, metrics=self.page)
            try:
                await first(stopped(), control.stopped(), raises(engine.failed()))
                control.leave()
                await first(drain(service, drain_timeout_s, heart.send_now), raises(engine.failed()))
            except Exception:
                await give_up(service, heart.send_now)
                raise

    def _endpoints(self, service: WorkerService) -> Sequence[Endpoint]:
        own = [present_endpoint(self.registration), status_endpoint(self.figures)]
        return [*service.endpoints(), *self.profiles.endpoints(), *self.kv_events.endpoints(), *own]


@asynccontextmanager
async def _start_logged(role: WorkerRole, model: str) -> AsyncIterator[None]:
    """Log before connecting to servers and loading weights, which may take long."""
    log.info("starting", extra={"role": role, "model": model})
    yield


@asynccontextmanager
async def open_worker(settings: WorkerSettings, config: EngineConfig, role: WorkerRole) -> AsyncIterator[Worker]:
    me = new_instance_id(settings.instance_id)
    subject = subject_of(settings.namespace, role, me)
    kv_opener(settings.kv_transfer)  # first, so that an invalid name is reported before a model is loaded
    registration = Registration(me)
    metrics = WorkerMetrics()
    async with (
        start_telemetry(settings, role, me, config.tensor_parallel) as telemetry,
        _start_logged(role, settings.model),
        connect_bus(settings.nats_url, f"{role}-{me}", settings.nats_access(role)) as bus,
        follow_kept(bus, settings.namespace, telemetry.held),
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s, settings.etcd_access()) as registry,
        serve_health(settings, metrics.registry, bus, registry, registration) as page,  # loading may take minutes
        start_engine(settings.model, config, settings.home, log_progress, follower=RANK) as engine,
        open_masks(
            lambda: model_dir(settings.model, settings.home),
            engine.engine.vocab_size,
            engine.engine.eos_token_ids,
            ConstraintMetrics(metrics.registry),
        ) as masks,
        open_transfer(
            settings.kv_transfer,
            engine.engine.kv_region,
            f"{role}-{me}-{registration.epoch}",  # with the epoch: peers cache agents by name, and an instance may restart
            settings.kv_transfer_host or own_address(settings.etcd_url),
            max_request_pages(engine.engine),
        ) as opened,
        keep_profiles(f"{role} {me}", EngineProfiler(engine, {"role": role, "instance": me})) as profiles,
        KvEventPublisher(
            bus,
            subject,
            me,
            lambda: registration.epoch,
            on=config.kv_events,
            rest_s=partial(FleetSizes(registry.book).kv_events_rest_s, role),
        ).running() as kv_events,
        measure(
            settings,
            role,
            me,
            bus,
            registry.contact_age_s,
            metrics=metrics.registry,
            telemetry=telemetry,
            epoch=lambda: registration.epoch,
            model=model_name(settings),
        ) as figures,
        keep_present(bus, registry.book),
    ):
        transfer = opened.transfer
        figures.layout = transfer.endpoint.layout.text
        figures.kv_transfer = transfer.endpoint.backend
        figures.kv_transport = known_transport(transfer.endpoint.backend)
        figures.transport = observed_transport
        metrics.record(engine.stats)
        yield Worker(
            role=role,
            instance_id=me,
            subject=subject,
            settings=settings,
            config=config,
            registration=registration,
            metrics=metrics,
            figures=figures,
            bus=bus,
            registry=registry,
            engine=engine,
            masks=masks,
            transfer=transfer,
            writes=opened.writes,
            kv_events=kv_events,
            profiles=profiles,
            page=page,
        )
