"""Errors of etcd and NATS as one line with advice."""

from collections.abc import Iterator
from contextlib import contextmanager

from components.errors import MeshError
from components.urls import without_password


@contextmanager
def one_line_errors(*, etcd_url: str | None = None, nats_url: str | None = None) -> Iterator[None]:
    """End the process with a line for a TimeoutError of these servers, or for a MeshError."""
    try:
        yield
    except TimeoutError:
        given = (("etcd", etcd_url, "--etcd-url"), ("NATS", nats_url, "--nats-url"))
        servers = [(f"{name} at {without_password(url)}", option) for name, url, option in given if url]
        where, options = " or ".join(server for server, _ in servers), " and ".join(option for _, option in servers)
        raise SystemExit(f"no answer from {where}: set {options}") from None
    except MeshError as exc:
        raise SystemExit(exc.message) from None
