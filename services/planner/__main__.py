"""python -m services.planner: computes how many workers the load needs, and starts and stops them by a connector."""

import logging
import os
import socket
from dataclasses import asdict
from typing import Final

from components.aio import first
from components.discovery.leader import lead
from components.discovery.pages import scrape_targets
from components.discovery.registry import join_registry
from components.local_mesh import beside_local_mesh, local_mesh
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.process import new_instance_id, run, stop_signal
from components.process_control import ProcessControl
from components.process_health import measure, protection_of, status_endpoint
from components.telemetry.logs import log_ready
from components.telemetry.metrics_page import serve_metrics
from components.telemetry.telemetry import start_telemetry
from services.planner.config import PlannerSettings
from services.planner.connectors import open_connector
from services.planner.fleet_sampler import open_fleet_sampler
from services.planner.metrics import PlannerMetrics
from services.planner.planning import Planning

log = logging.getLogger(__name__)

NO_DRAIN: Final = "it holds no requests; --stop ends it at once, and another planner leads"


async def main(settings: PlannerSettings) -> None:
    """Plan until a signal. The workers are not affected by the end."""
    me = new_instance_id(settings.instance_id)
    subject = f"{settings.namespace}.planner.{me}"
    metrics = PlannerMetrics()
    facts: dict[str, str | int] = {
        "instance_id": me,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "connector": settings.connector,
    }
    async with (
        start_telemetry(settings, "planner", me) as telemetry,
        connect_bus(settings.nats_url, f"planner-{me}", settings.nats_access("planner")) as bus,
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s, settings.etcd_access()) as registry,
        open_fleet_sampler(bus, settings.namespace, registry.book, settings.page_access()) as sampler,
        serve_metrics(
            metrics.registry,
            settings.metrics_host,
            settings.metrics_port,
            lambda: True,
            targets=lambda host: [asdict(one) for one in scrape_targets(registry.book, settings.namespace, host)],
            protection=protection_of(settings),
        ) as page,
        lead(
            settings.etcd_url,
            f"{settings.namespace}/planner",
            {**facts, "http": page},
            settings.leader_ttl_s,
            settings.etcd_access(),
        ) as leader,
        measure(
            settings, "planner", me, bus, leader.contact_age_s, metrics=metrics.registry, telemetry=telemetry
        ) as figures,
    ):
        planning = Planning(settings, sampler, open_connector(settings, bus), leader, metrics)
        figures.heartbeat_ages_s = sampler.ages_s
        sampler.show(metrics.registry)
        control = ProcessControl(figures, NO_DRAIN)
        endpoints = [*planning.endpoints(), status_endpoint(figures), control.endpoint()]
        async with serve_calls(bus, "planner", subject, endpoints, {"instance_id": me}):
            log_ready(instance=me, connector=settings.connector, metrics=page)
            await first(stop_signal(), control.stopped(), planning.run())


def read_settings(argv: list[str] | None = None) -> PlannerSettings:
    """Read the settings, with addresses of a local mesh; warn if only the default addresses are left."""
    settings = PlannerSettings.read(argv)
    if not local_mesh(settings.home) and not {"etcd_url", "nats_url"} & settings.model_fields_set:
        log.warning(
            f"no services.local runs with state directory {settings.home} (--state-dir): trying the usual ports"
        )
    return beside_local_mesh(settings, "planner")


if __name__ == "__main__":
    run(main(read_settings()))
