"""Creates the parts of `/ui` and runs its background tasks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from components.aio import background
from components.discovery.book import InstanceBook
from components.messaging.bus import Bus
from components.messaging.heartbeat_query import HeartbeatQuery
from components.messaging.liveness import Liveness
from components.urls import is_loopback
from services.frontend.config import FrontendSettings
from services.frontend.ui.api import Ui
from services.frontend.ui.control import LocalControl
from services.frontend.ui.feed import Feed
from services.frontend.ui.load_history import LoadHistory
from services.frontend.ui.mesh_load import MeshLoad
from services.frontend.ui.mesh_view import MeshView, Reports, about_mesh
from services.frontend.ui.status_poll import StatusPoll
from services.frontend.ui.traces import Traces

log = logging.getLogger(__name__)

RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class MeshSources:
    me: str  # instance id of this frontend
    model: str
    bus: Bus
    book: InstanceBook
    decodes: Liveness
    prefills: HeartbeatQuery


def make_ui(settings: FrontendSettings, sources: MeshSources, is_over: Callable[[], bool]) -> tuple[Ui, StatusPoll]:
    """Return the page and the poll that updates it. When `is_over`, the live feeds end."""
    history, reports = LoadHistory(), Reports()
    load = MeshLoad(history)
    about = about_mesh(settings.namespace, sources.model, sources.me)
    view = MeshView(sources.book, sources.decodes, reports, about, nats_contact_age_s=sources.bus.contact_age_s)
    poll = StatusPoll(sources.me, sources.bus, sources.book, sources.prefills, reports=reports, load=load)
    ui = Ui(
        Feed(lambda: view.snapshot(load.samples()), is_over),
        history,
        Traces(settings, shows_content=shows_content(settings)),
        LocalControl(sources.bus, settings.ui_control) if settings.ui_control else None,
    )
    return ui, poll


def shows_content(settings: FrontendSettings) -> bool:
    """Return whether the page shows clients' texts. On a loopback address without API keys they are the viewer's own."""
    if settings.ui_content is not None:
        return settings.ui_content
    return settings.api_keys is None and settings.api_keys_file is None and is_loopback(settings.host)


@asynccontextmanager
async def run_ui(ui: Ui, poll: StatusPoll) -> AsyncIterator[None]:
    async with (
        background(_kept_running(ui.feed.run), "ui-feed"),
        background(_kept_running(ui.history.run), "ui-history"),
        background(_kept_running(lambda: poll.run(ui.feed)), "ui-status"),
    ):
        yield


async def _kept_running(work: Callable[[], Awaitable[None]]) -> None:
    """Restart `work` after an error, because an error of the page must not end the frontend."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("a task of the page at /ui failed, restarting it")
        await asyncio.sleep(RETRY_S)
