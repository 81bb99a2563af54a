"""Probes and health metrics of a process."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Gauge

from components.discovery.registry import Registration, Registry
from components.messaging.bus import Bus
from components.settings import MeshSettings
from components.telemetry.worker_metrics import serve_metrics


class ProcessHealth:
    """An outage of etcd is a metric but does not make a process unready: requests do not need etcd.

    An outage of NATS makes it unready but not dead: it reconnects, and a restart would gain nothing.
    """

    def __init__(self, bus: Bus, registry: Registry, registration: Registration, metrics: CollectorRegistry) -> None:
        self._bus = bus
        self._registration = registration
        shown = {
            "nats_connected": ("Whether NATS can be reached.", lambda: bus.is_connected),
            "etcd_connected": ("Whether the mirror of etcd is up to date.", lambda: registry.connected),
            "etcd_leased": ("Whether this process's own record stands in etcd.", registration.is_leased),
        }
        for name, (text, figure) in shown.items():
            Gauge(name, text, registry=metrics).set_function(figure)

    def started(self) -> bool:
        """True from the first registration on, also during an outage."""
        return self._registration.leased_until > 0

    def reasons(self) -> list[str]:
        """Reasons why this process cannot work now."""
        reasons = [] if self.started() else ["this process has not registered in etcd yet"]
        if not self._bus.is_connected:
            reasons.append("NATS cannot be reached")
        if self._registration.leaving:
            reasons.append("this process is leaving")
        return reasons


@asynccontextmanager
async def serve_health(
    settings: MeshSettings,
    metrics: CollectorRegistry,
    bus: Bus,
    registry: Registry,
    registration: Registration,
    *,
    facts: Callable[[], Mapping[str, object]] = dict,
) -> AsyncIterator[str]:
    """Serve metrics and probes; yields the URL. `facts` are added to `/health`."""
    health = ProcessHealth(bus, registry, registration, metrics)
    async with serve_metrics(
        metrics, settings.metrics_host, settings.metrics_port, health.started, reasons=health.reasons, facts=facts
    ) as url:
        yield url
