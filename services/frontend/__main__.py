"""python -m services.frontend: the mesh's OpenAI endpoint."""

import asyncio
import logging
from pathlib import Path
from typing import Final

from components.aio import first
from components.discovery.pages import scrape_targets
from components.http.limits import ClientLimits
from components.http.server import serve_http
from components.http.writer import HeldWrites
from components.messaging.call_server import Endpoint, serve_calls
from components.messaging.heartbeat_query import HeartbeatQuery
from components.messaging.presence import keep_present, present_endpoint
from components.openai.errors import http_refusal
from components.openai.operations import WorkerList
from components.output.formats import FormatOptions
from components.process import record_maker, run, settle, stop_signals
from components.process_control import ProcessControl
from components.process_health import serve_health, status_endpoint
from components.startup import refuse
from components.structured.checker import open_checker
from components.structured.metrics import ConstraintMetrics
from components.telemetry.logs import log_progress, log_ready
from components.text.sampling_defaults import read_sampling_defaults
from components.text.tokenizer import TextModel
from components.urls import is_loopback
from engine.model.end_tokens import read_end_tokens
from engine.model.resolve import model_dir
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.connections import Connections, open_connections
from services.frontend.decode_choice import Waits, explain_endpoint
from services.frontend.keys import KeyRing, open_keys
from services.frontend.mesh_client import MeshClient
from services.frontend.operations import DRAINING, Operations, workers_of
from services.frontend.server_metrics import send_server_metrics
from services.frontend.stored import StoredResponses, open_stored
from services.frontend.ui.run_ui import MeshSources, make_ui, run_ui

log = logging.getLogger(__name__)

SHARED_PORT: Final = (
    "it shares its port with other frontends of this host, and the kernel would keep sending it connections; use --stop: "
    "it then finishes its requests and ends"
)


def warn_if_exposed(settings: FrontendSettings, keys: KeyRing | None) -> None:
    """Log a warning if other machines can reach this address and API keys or TLS are missing."""
    if is_loopback(settings.host):
        return
    if keys is None:
        log.warning(
            "no API keys are set: anyone who reaches this address may send requests", extra={"host": settings.host}
        )
    elif settings.https is None:
        log.warning("API keys are sent unencrypted: set --tls-cert and --tls-key", extra={"host": settings.host})


async def load_text(settings: FrontendSettings) -> tuple[Path, TextModel]:
    """Return the model's directory, and its tokenizer and chat template. Exit if they cannot be used."""
    folder = await asyncio.to_thread(model_dir, settings.model, settings.home, log_progress)
    options = FormatOptions(settings.tool_format, settings.tool_parser, settings.reasoning_parser)
    ends = read_end_tokens(folder)
    try:
        text = await asyncio.to_thread(TextModel.load, folder, options, ends=ends)
    except ValueError as exc:
        refuse(f"settings: {exc}")
    text.warm_up()  # on this thread, because it encodes the short prompts
    return folder, text


def make_operations(
    settings: FrontendSettings, links: Connections, mesh: MeshClient, prefills: HeartbeatQuery
) -> Operations:
    book, registration = links.registry.book, links.registration

    async def workers() -> WorkerList:
        """Ask prefill instances for their load, because a frontend does not subscribe to their heartbeats."""
        return workers_of(book, {"decode": links.decodes.alive, "prefill": await prefills.answers()})

    return Operations(
        mesh,
        [
            lambda: None if registration.leased_until_s else "this frontend has not registered in etcd yet",
            lambda: None if links.bus.is_connected else "NATS cannot be reached",
        ],
        workers,
        lambda host: scrape_targets(book, settings.namespace, host),
    )


def endpoints_of(
    links: Connections, mesh: MeshClient, text: TextModel, control: ProcessControl, stored: StoredResponses | None
) -> list[Endpoint]:
    """Return the calls that this frontend answers on NATS, except those for `/ui`."""
    own = [
        explain_endpoint(mesh.choice, text, links.model),
        present_endpoint(links.registration),
        status_endpoint(links.figures),
        control.endpoint(),
    ]
    return own if stored is None else [*own, stored.endpoint()]


def client_limits(settings: FrontendSettings) -> ClientLimits:
    timeout_s = settings.client_timeout_s
    return ClientLimits(head_s=timeout_s, body_s=timeout_s, unread_s=timeout_s)


async def main(settings: FrontendSettings) -> None:
    """Serve until a stop signal, then finish the requests."""
    writes = HeldWrites()  # a frame has tokens of many requests, whose events are written to the sockets together
    async with open_keys(settings) as keys, open_connections(settings, writes) as links:
        folder, text = await load_text(settings)
        waits = Waits(settings.no_worker_wait_s, settings.lost_worker_wait_s)
        mesh = MeshClient(links.bus, links.inbox, links.decodes, links.model, waits)
        mesh.moves.show(links.metrics)
        stored = await open_stored(links.bus, settings, links.subject)
        prefills = HeartbeatQuery(links.bus, settings.namespace, "prefill", links.registry.book)
        operations = make_operations(settings, links, mesh, prefills)
        links.figures.is_draining = lambda: operations.is_draining
        control = ProcessControl(links.figures, SHARED_PORT)
        if not settings.share_port:
            control.serves(operations.order)
        sources = MeshSources(
            links.instance_id, links.model, links.bus, links.registry.book, links.decodes.alive, prefills
        )
        ui, poll = make_ui(settings, sources, lambda: operations.draining)
        endpoints = [*endpoints_of(links, mesh, text, control, stored), ui.history.endpoint()]
        leaving = asyncio.Event()
        async with (
            send_server_metrics(settings, links.instance_id, links.telemetry.export.takes_metrics) as server_metrics,
            run_ui(ui, poll),
            open_checker(folder, settings.compile_budget_s, ConstraintMetrics(links.metrics)) as checker,
            serve_health(
                settings,
                links.metrics,
                links.bus,
                links.registry,
                links.registration,
                facts=lambda: {"models": [model.name for model in mesh.listed_models()]},
                reasons=lambda: [DRAINING] if operations.is_draining else [],
            ) as page,
            keep_present(links.bus, links.registry.book),
            # outside serve_http, which drains, so that background requests can be cancelled until that has ended
            serve_calls(links.bus, "frontend", links.subject, endpoints, {"instance_id": links.instance_id}),
            serve_http(
                create_app(
                    mesh,
                    text,
                    settings,
                    links.metrics,
                    read_sampling_defaults(folder),
                    keys=keys,
                    stored=stored,
                    checker=checker,
                    operations=operations,
                    figures=links.figures,
                    server_metrics=server_metrics,
                    ui=ui if settings.ui else None,
                ),
                settings,
                share_port=settings.share_port,
                tls=settings.https,
                limits=client_limits(settings),
                refusal=http_refusal,
                registry=links.metrics,
                writes=writes,
                leaving=leaving,
            ) as url,
        ):
            me = links.instance_id
            record = record_maker(settings, "frontend", me, model=links.model, http=url, metrics=page)
            async with stop_signals() as stopped, links.registry.advertise(links.registration, record):
                settle()
                warn_if_exposed(settings, keys)
                log_ready(instance=me, url=url, metrics=page)
                await first(stopped(), control.stopped())
                control.leave()
                operations.draining = True
                leaving.set()
                await asyncio.sleep(settings.unready_s)  # a load balancer and clients notice, and connect elsewhere


if __name__ == "__main__":
    run(main(FrontendSettings.read()))
