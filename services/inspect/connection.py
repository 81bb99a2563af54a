"""Errors of etcd and NATS as one line with advice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from components.errors import MeshError
from components.local_mesh import no_answer_advice
from components.settings import MeshSettings
from components.urls import without_password


@contextmanager
def one_line_errors(settings: MeshSettings, *servers: Literal["etcd", "NATS"]) -> Iterator[None]:
    """End the process with a line for a TimeoutError of these servers, or for a MeshError."""
    try:
        yield
    except TimeoutError:
        urls = {"etcd": settings.etcd_url, "NATS": settings.nats_url}
        where = " or ".join(f"{name} at {without_password(urls[name])}" for name in servers)
        raise SystemExit(f"no answer from {where}: {no_answer_advice(settings)}") from None
    except MeshError as exc:
        raise SystemExit(exc.message) from None
