"""Make the stream of stored responses, where users of NATS have rights and frontends may not.

`python -m services.frontend.response_stream` needs the administrator's access to NATS, and the settings of the
frontends. A later run gives the stream the settings that they have then. If they store no responses, it does nothing.
"""

import asyncio
import sys
from typing import Final

from components.aio import time_limit
from components.errors import MeshError
from components.messaging.connection import connect_bus
from components.messaging.records import Records
from components.permissions import ADMINISTRATOR
from components.urls import without_password
from services.frontend.config import FrontendSettings

TIMEOUT_S: Final = 10.0


async def make_stream(settings: FrontendSettings) -> None:
    """Raises: MeshError."""
    late = f"NATS at {without_password(settings.nats_url)} has not answered within"
    bus_of = connect_bus(settings.nats_url, "response-stream", settings.nats_access(ADMINISTRATOR))
    async with time_limit(TIMEOUT_S, late), bus_of as bus:
        await Records(bus, f"{settings.namespace}.responses", settings.stored_config).make()


def main() -> None:
    settings = FrontendSettings.read([])
    if settings.max_stored_responses == 0:
        return
    try:
        asyncio.run(make_stream(settings))
    except MeshError as exc:
        sys.exit(exc.message)


if __name__ == "__main__":
    main()
