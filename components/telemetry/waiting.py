"""Log that a process waits for a server, because without a line it would seem to hang."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from components.aio import background
from components.urls import without_password

log = logging.getLogger(__name__)

FIRST_S: Final = 1.0  # a running server answers sooner
LOG_INTERVAL_S: Final = 10.0


@asynccontextmanager
async def waiting_logged(what: str, url: str) -> AsyncIterator[None]:
    async with background(_log_waiting(what, without_password(url)), f"waiting-for-{what}"):
        yield


async def _log_waiting(what: str, url: str) -> None:
    began_s = time.monotonic()
    await asyncio.sleep(FIRST_S)
    log.warning(f"waiting for {what}", extra={"url": url})
    while True:
        await asyncio.sleep(LOG_INTERVAL_S)
        log.warning(f"still waiting for {what}", extra={"url": url, "waited_s": round(time.monotonic() - began_s)})
