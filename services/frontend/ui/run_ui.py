"""The parts of `/ui`, and the tasks behind it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from components.aio import background
from components.messaging.bus import Bus
from services.frontend.config import FrontendSettings
from services.frontend.ui.api import Ui
from services.frontend.ui.control import LocalControl
from services.frontend.ui.feed import Feed
from services.frontend.ui.load_history import LoadHistory
from services.frontend.ui.mesh_view import MeshView
from services.frontend.ui.status_poll import StatusPoll
from services.frontend.ui.traces import Traces

log = logging.getLogger(__name__)

RETRY_S: Final = 5.0


def make_ui(settings: FrontendSettings, view: MeshView, bus: Bus, is_over: Callable[[], bool]) -> Ui:
    history = LoadHistory()
    return Ui(
        Feed(lambda: view.look(history.samples), is_over),
        history,
        Traces(settings, shows_content=settings.ui_content),
        LocalControl(bus, settings.ui_control) if settings.ui_control else None,
    )


@asynccontextmanager
async def run_ui(ui: Ui | None, poll: StatusPoll) -> AsyncIterator[None]:
    """Run the tasks of the page; without one, none."""
    if ui is None:
        yield
        return
    async with (
        background(_kept_running(ui.feed.run), "ui-feed"),
        background(_kept_running(ui.history.run), "ui-history"),
        background(_kept_running(lambda: poll.run(ui.feed)), "ui-status"),
    ):
        yield


async def _kept_running(work: Callable[[], Awaitable[None]]) -> None:
    """Start `work` again after an error: a fault of the page must not end the frontend."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("the page at /ui has a fault")
        await asyncio.sleep(RETRY_S)
