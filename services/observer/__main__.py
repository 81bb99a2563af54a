"""python -m services.observer: receives spans from all hosts and keeps the latest traces."""

import os
from contextlib import closing
from typing import Final

from components.http.server import serve_http
from components.process import run, settle, stop_signal
from components.telemetry.logs import configure_logs, log_ready
from services.observer.app import ObserverApp
from services.observer.config import ObserverSettings

NICE: Final = 5  # spans can wait in their processes, while requests need the cores


async def main(settings: ObserverSettings) -> None:
    """Serve until a stop signal. Needs neither etcd nor NATS."""
    os.nice(NICE)
    configure_logs(settings.log_level, settings.log_format)
    with closing(ObserverApp(settings)) as app:
        async with serve_http(app, settings, tls=settings.https) as url:
            settle()
            log_ready(url=url)
            await stop_signal()


if __name__ == "__main__":
    run(main(ObserverSettings.read()))
