"""Probes, health metrics and status of a process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from components.aio import background
from components.discovery.pages import scrape_targets
from components.discovery.registry import Registration, Registry
from components.http.tls import Tls
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.settings import MeshSettings
from components.startup import WrongSettings
from components.telemetry.figures import Figures
from components.telemetry.metrics_page import Protection, serve_metrics
from components.telemetry.on_demand import OnDemand
from components.telemetry.process_metrics import show_process
from components.telemetry.telemetry import Telemetry
from components.wire.status import Status, StatusRequest


class ProcessHealth:
    """Requests do not need etcd, so without it a process stays ready.

    Without NATS it is not ready, but a restart would gain nothing: it reconnects.
    """

    def __init__(self, bus: Bus, registry: Registry, registration: Registration, metrics: CollectorRegistry) -> None:
        self._bus = bus
        self._registration = registration
        shown = OnDemand(metrics)
        shown.gauge("kvmesh_nats_connected", "1 if NATS can be reached.", lambda: bus.is_connected)
        shown.gauge("kvmesh_etcd_connected", "1 if the mirror of etcd is up to date.", lambda: registry.connected)
        shown.gauge("kvmesh_etcd_leased", "1 if this process's own record is in etcd.", registration.is_leased)

    def started(self) -> bool:
        """True after the first registration, also during an outage."""
        return self._registration.leased_until_s > 0

    def reasons(self) -> list[str]:
        reasons = [] if self.started() else ["this process has not registered in etcd yet"]
        if not self._bus.is_connected:
            reasons.append("NATS cannot be reached")
        if self._registration.leaving:
            reasons.append("this process is leaving")
        return reasons


METRICS_TLS: Final = ("MESH_METRICS_TLS_CERT", "MESH_METRICS_TLS_KEY")


def protection_of(settings: MeshSettings) -> Protection:
    """Raises: WrongSettings."""
    certificate, key = settings.metrics_tls_cert, settings.metrics_tls_key
    if (certificate is None) != (key is None):
        raise WrongSettings(f"{' and '.join(METRICS_TLS)} belong together: set both or neither")
    tls = None if certificate is None else Tls(str(certificate), str(key), METRICS_TLS)
    return Protection(tls, settings.metrics_login())


@asynccontextmanager
async def serve_health(
    settings: MeshSettings,
    metrics: CollectorRegistry,
    bus: Bus,
    registry: Registry,
    registration: Registration,
    *,
    facts: Callable[[], Mapping[str, object]] = dict,
    reasons: Callable[[], Sequence[str]] = tuple,
) -> AsyncIterator[str]:
    """Yields the URL of the probes. `reasons`: more, for which `/ready` answers 503."""
    health = ProcessHealth(bus, registry, registration, metrics)
    async with serve_metrics(
        metrics,
        settings.metrics_host,
        settings.metrics_port,
        health.started,
        reasons=lambda: [*health.reasons(), *reasons()],
        facts=facts,
        targets=lambda host: [asdict(one) for one in scrape_targets(registry.book, settings.namespace, host)],
        protection=protection_of(settings),
    ) as url:
        yield url


@asynccontextmanager
async def measure(
    settings: MeshSettings,
    role: str,
    instance_id: str,
    bus: Bus,
    etcd_contact_age_s: Callable[[], float],
    *,
    metrics: CollectorRegistry,
    telemetry: Telemetry,
    epoch: Callable[[], str] = str,
    model: str = "",
) -> AsyncIterator[Figures]:
    """Yields the process's figures, which `metrics` shows. The event loop is probed while inside."""
    figures = Figures(
        role,
        instance_id,
        model=model,
        traces_per_s=settings.traces_per_s,
        epoch=epoch,
        etcd_contact_age_s=etcd_contact_age_s,
        nats_contact_age_s=bus.contact_age_s,
    )
    show_process(figures, metrics)
    OnDemand(metrics).counter(
        "kvmesh_spans_dropped",
        "Spans of traces that this process dropped, by cause.",
        lambda: {(cause,): count for cause, count in telemetry.dropped.items()},
        ["cause"],
    )
    metrics.register(bus.refusals)
    metrics.register(bus.clocks)
    async with background(figures.loop.run(), "loop-probe"):
        yield figures


def status_endpoint(figures: Figures) -> Endpoint:
    async def status(asked: StatusRequest) -> Status:
        found = figures.status()
        if not asked.transport or figures.transport is None:
            return found
        try:
            return replace(found, transport=await asyncio.to_thread(figures.transport))
        except OSError:  # no /proc, or one without our files
            return found

    return Endpoint("status", StatusRequest, status, runs_inline=True, is_idempotent=True)
