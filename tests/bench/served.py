"""An application behind a real port, on a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from tests.waiting import wait_until


@contextmanager
def served(app: FastAPI, port: int) -> Iterator[None]:
    """Serve while inside."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
