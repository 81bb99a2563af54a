"""python -m services.bootstrap: bootstrap rooms for the mesh."""

from prometheus_client import CollectorRegistry

from components.aio import background, first
from components.discovery.registry import Registration, join_registry
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.messaging.kept_traces import follow_kept
from components.messaging.presence import keep_present, present_endpoint
from components.process import new_instance_id, record_maker, run, settle, stop_signals, subject_of
from components.process_control import ProcessControl
from components.process_health import measure, serve_health, status_endpoint
from components.telemetry.logs import log_ready
from components.telemetry.telemetry import start_telemetry
from services.bootstrap.config import BootstrapSettings
from services.bootstrap.service import BootstrapService


async def main(settings: BootstrapSettings) -> None:
    """Serve until a stop signal."""
    me = new_instance_id(settings.instance_id)
    subject = subject_of(settings.namespace, "bootstrap", me)
    registration = Registration(me)
    metrics = CollectorRegistry()
    async with (
        start_telemetry(settings, "bootstrap", me) as telemetry,
        connect_bus(settings.nats_url, f"bootstrap-{me}", settings.nats_access("bootstrap")) as bus,
        follow_kept(bus, settings.namespace, telemetry.held),
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s, settings.etcd_access()) as registry,
        serve_health(settings, metrics, bus, registry, registration) as page,
        measure(
            settings,
            "bootstrap",
            me,
            bus,
            registry.contact_age_s,
            metrics=metrics,
            telemetry=telemetry,
            epoch=lambda: registration.epoch,
        ) as figures,
        keep_present(bus, registry.book),
    ):
        service = BootstrapService(bus, settings.namespace, registration, metrics)
        service.show(figures)
        figures.is_draining = lambda: service.draining
        control = ProcessControl(figures)
        control.serves(service)
        own = [present_endpoint(registration), status_endpoint(figures), control.endpoint()]
        endpoints = [*service.endpoints(), *own]
        async with (
            background(service.clean(settings.room_cleanup_s), "clean-rooms"),
            serve_calls(bus, "bootstrap", subject, endpoints, {"instance_id": me}),
            stop_signals() as stopped,
            registry.advertise(registration, record_maker(settings, "bootstrap", me, http=page)),
        ):
            settle()
            log_ready(instance=me, metrics=page)
            await first(stopped(), control.stopped())
            control.leave()
            await service.leave()


if __name__ == "__main__":
    run(main(BootstrapSettings.read()))
