"""A frontend's connections to the mesh, and its measurements."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from components.discovery.registry import Registration, Registry, join_registry
from components.http.writer import HeldWrites
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.messaging.fleet import Fleet, open_fleet
from components.messaging.inbox import StreamInbox, open_inbox
from components.messaging.kept_traces import announce_kept
from components.process import new_instance_id, subject_of
from components.process_health import measure
from components.telemetry.figures import Figures
from components.telemetry.telemetry import Telemetry, start_telemetry
from engine.model.resolve import served_name
from services.frontend.config import FrontendSettings


@dataclass(frozen=True, slots=True)
class Connections:
    instance_id: str
    subject: str  # where this frontend answers on NATS
    model: str  # its served name
    registration: Registration
    metrics: CollectorRegistry
    telemetry: Telemetry
    figures: Figures
    bus: Bus
    registry: Registry
    decodes: Fleet
    inbox: StreamInbox  # of the streams from decode


@asynccontextmanager
async def open_connections(settings: FrontendSettings, writes: HeldWrites) -> AsyncIterator[Connections]:
    """Connect to etcd and NATS, and watch the decode instances. `writes` are buffered while a frame is handled."""
    me = new_instance_id(settings.instance_id)
    model = settings.served_model_name or served_name(settings.model)
    metrics = CollectorRegistry()
    registration = Registration(me)
    async with (
        start_telemetry(settings, "frontend", me) as telemetry,
        connect_bus(settings.nats_url, f"frontend-{me}", settings.nats_access("frontend")) as bus,
        announce_kept(bus, settings.namespace, telemetry.held),
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s, settings.etcd_access()) as registry,
        open_fleet(
            bus,
            settings.namespace,
            "decode",
            registry.book,
            settings.decode_policy,
            kv_index_blocks=settings.kv_index_blocks,
            metrics=metrics,
        ) as decodes,
        open_inbox(bus, tokens_subject(settings, registration), writes) as inbox,
        measure(
            settings,
            "frontend",
            me,
            bus,
            registry.contact_age_s,
            metrics=metrics,
            telemetry=telemetry,
            epoch=lambda: registration.epoch,
            model=model,
        ) as figures,
    ):
        inbox.show(metrics)
        figures.heartbeat_ages_s = decodes.alive.ages_s
        figures.breakers = decodes.router.health.states
        yield Connections(
            instance_id=me,
            subject=subject_of(settings.namespace, "frontend", me),
            model=model,
            registration=registration,
            metrics=metrics,
            telemetry=telemetry,
            figures=figures,
            bus=bus,
            registry=registry,
            decodes=decodes,
            inbox=inbox,
        )


def tokens_subject(settings: FrontendSettings, registration: Registration) -> str:
    """Return the subject of this frontend's token frames.

    It has the NATS user's name, so that access rights can keep other frontends from reading it. It has the epoch, because a
    restarted process has the same id and the same stream numbers as before, and decode may still send frames for those.
    """
    me = f"{registration.instance_id}-{registration.epoch}"
    return f"{settings.namespace}.tokens.{settings.nats_name or 'frontend'}.{me}"
