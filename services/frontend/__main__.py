"""python -m services.frontend: the OpenAI endpoint of the mesh."""

import asyncio
import ipaddress
import logging
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from components.aio import first
from components.api_keys import BadKeys, read_keys
from components.discovery.pages import scrape_targets
from components.discovery.registry import Registration, join_registry
from components.http.limits import ClientLimits
from components.http.server import serve_http
from components.http.tls import Tls
from components.http.writer import HeldWrites
from components.messaging.bus import connect_bus
from components.messaging.call_server import serve_calls
from components.messaging.fleet import watch_fleet
from components.messaging.inbox import open_inbox
from components.messaging.kept_traces import announce_kept
from components.messaging.presence import keep_present, present_endpoint
from components.messaging.roll_call import RollCall
from components.openai.errors import http_refusal
from components.openai.operations import WorkerList
from components.output.formats import FormatOptions
from components.process import new_instance_id, record_maker, run, settle, stop_signal, subject_of
from components.process_control import ProcessControl
from components.process_health import measure, serve_health, status_endpoint
from components.startup import refuse
from components.structured.checker import open_checker
from components.structured.metrics import ConstraintMetrics
from components.telemetry.logs import log_progress, log_ready
from components.telemetry.spans import start_telemetry
from components.text.sampling_defaults import read_sampling_defaults
from components.text.tokenizer import TextModel
from engine.model.resolve import model_dir, served_name
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.decode_choice import explain_endpoint
from services.frontend.keys import KeyRing, follow_keys
from services.frontend.mesh_client import MeshClient
from services.frontend.operations import DRAINING, Operations, workers_of
from services.frontend.server_metrics import send_server_metrics
from services.frontend.stored import open_stored
from services.frontend.ui.run_ui import MeshSources, make_ui, run_ui

log = logging.getLogger(__name__)

SHARED_PORT: Final = (
    "it shares its port with other frontends of this host, and the kernel would go on giving it connections; with --stop "
    "it finishes its requests and ends"
)


def key_ring(given: str | None, file: Path | None) -> KeyRing | None:
    """Return the keys that clients need, or None. Exits if they are invalid."""
    if given is None and file is None:
        return None
    try:
        return KeyRing(read_keys(given, file))
    except BadKeys as exc:
        refuse(f"API keys: {exc}")


def warn_if_exposed(settings: FrontendSettings, keys: KeyRing | None) -> None:
    """Warn if others can reach this address and keys or TLS are missing."""
    try:
        here = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        here = False
    if here:
        return
    if keys is None:
        log.warning(
            "no API keys are set: anyone who reaches this address may send requests", extra={"host": settings.host}
        )
    elif settings.tls_cert is None:
        log.warning("API keys are sent unencrypted: set --tls-cert and --tls-key", extra={"host": settings.host})


def tokens_subject(settings: FrontendSettings, instance_id: str) -> str:
    """In a part that NATS may reserve for one frontend's user: no other then reads the answers to its clients."""
    return f"{settings.namespace}.tokens.{settings.nats_name or 'frontend'}.{instance_id}"


async def main(settings: FrontendSettings) -> None:
    me = new_instance_id(settings.instance_id)
    subject = subject_of(settings.namespace, "frontend", me)
    model = settings.served_model_name or served_name(settings.model)
    given_keys = None if settings.api_keys is None else settings.api_keys.get_secret_value()
    writes = HeldWrites()  # a frame has tokens of many requests; their events leave together
    keys = key_ring(given_keys, settings.api_keys_file)
    metrics = CollectorRegistry()
    registration = Registration(me)
    async with (
        start_telemetry(settings, "frontend", me) as telemetry,
        follow_keys(keys, given_keys, settings.api_keys_file),
        connect_bus(settings.nats_url, f"frontend-{me}", settings.nats_access("frontend")) as bus,
        announce_kept(bus, settings.namespace, telemetry.held),
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s, settings.etcd_access()) as registry,
        watch_fleet(
            bus,
            settings.namespace,
            "decode",
            registry.book,
            settings.decode_policy,
            kv_index_blocks=settings.kv_index_blocks,
            metrics=metrics,
        ) as decodes,
        open_inbox(bus, tokens_subject(settings, me), writes) as inbox,
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
        folder = await asyncio.to_thread(model_dir, settings.model, settings.home, log_progress)
        options = FormatOptions(settings.tool_format, settings.tool_parser, settings.reasoning_parser)
        try:
            text = await asyncio.to_thread(TextModel.load, folder, options)
        except ValueError as exc:
            refuse(f"settings: {exc}")
        mesh = MeshClient(bus, inbox, decodes, model, no_worker_wait_s=settings.no_worker_wait_s)
        mesh.moves.show(metrics)
        inbox.show(metrics)
        stored = await open_stored(bus, settings, subject)
        control = ProcessControl(figures, SHARED_PORT)
        calls = [
            explain_endpoint(mesh.choice, text, model),
            present_endpoint(registration),
            status_endpoint(figures),
            control.endpoint(),
        ]
        if stored is not None:
            calls.append(stored.endpoint())
        files = (settings.tls_cert, settings.tls_key)
        tls = Tls(str(files[0]), str(files[1])) if all(files) else None
        timeout_s = settings.client_timeout_s
        limits = ClientLimits(head_s=timeout_s, body_s=timeout_s, unread_s=timeout_s)
        prefills = RollCall(bus, settings.namespace, "prefill", registry.book)

        async def workers() -> WorkerList:
            """Ask prefill instances: a frontend does not follow their heartbeats."""
            return workers_of(registry.book, {"decode": decodes.alive, "prefill": await prefills.answers()})

        operations = Operations(
            mesh,
            [
                lambda: None if registration.leased_until else "this frontend has not registered in etcd yet",
                lambda: None if bus.is_connected else "NATS cannot be reached",
            ],
            workers,
            lambda host: scrape_targets(registry.book, settings.namespace, host),
        )
        figures.is_draining = lambda: operations.is_draining
        if not settings.share_port:
            control.serves(operations.order)
        figures.heartbeat_ages_s = decodes.alive.ages_s
        figures.breakers = decodes.router.health.states
        sources = MeshSources(me, model, bus, registry.book, decodes.alive, prefills)
        ui, poll = make_ui(settings, sources, lambda: operations.draining)
        calls.append(ui.history.endpoint())
        leaving = asyncio.Event()
        async with (
            send_server_metrics(settings, me, lambda: not telemetry.export.is_observed()) as server_metrics,
            run_ui(ui, poll),
            open_checker(folder, settings.compile_budget_s, ConstraintMetrics(metrics)) as checker,
            serve_health(
                settings,
                metrics,
                bus,
                registry,
                registration,
                facts=lambda: {"models": [model.name for model in mesh.models()]},
                reasons=lambda: [DRAINING] if operations.is_draining else [],
            ) as page,
            keep_present(bus, registry.book),
            # outside serve_http, which drains: background requests can be cancelled until then
            serve_calls(bus, "frontend", subject, calls, {"instance_id": me}),
            serve_http(
                create_app(
                    mesh,
                    text,
                    settings,
                    metrics,
                    read_sampling_defaults(folder),
                    keys=keys,
                    stored=stored,
                    checker=checker,
                    operations=operations,
                    figures=figures,
                    server_metrics=server_metrics,
                    ui=ui if settings.ui else None,
                ),
                settings,
                share_port=settings.share_port,
                tls=tls,
                limits=limits,
                refusal=http_refusal,
                registry=metrics,
                writes=writes,
                leaving=leaving,
            ) as url,
        ):
            record = record_maker(settings, "frontend", me, model=model, http=url, metrics=page)
            async with registry.advertise(registration, record):
                settle()
                warn_if_exposed(settings, keys)
                log_ready(instance=me, url=url, metrics=page)
                await first(stop_signal(), control.stopped())
                operations.draining = True
                leaving.set()
                await asyncio.sleep(settings.unready_s)  # a load balancer and clients see it, and go elsewhere


if __name__ == "__main__":
    run(main(FrontendSettings.read()))
