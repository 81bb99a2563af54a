"""Addresses of instances' metrics pages, for the planner and Prometheus."""

import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from components.discovery.book import InstanceBook
from components.urls import is_loopback
from components.wire.instances import InstanceRecord, Role

ROLES: Final[tuple[Role, ...]] = ("frontend", "decode", "prefill", "bootstrap")


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """An entry of Prometheus' HTTP service discovery."""

    targets: list[str]  # host:port
    labels: dict[str, str]


def page_of(record: InstanceRecord, own_host: str = socket.gethostname()) -> str | None:
    """The URL of an instance's page. The host's name replaces a loopback address of another host."""
    url = record.metrics or record.http
    if url is None:
        return None
    parts = urlsplit(url)
    if is_loopback(parts.hostname or "") and record.host != own_host:
        return f"{parts.scheme}://{record.host}:{parts.port}/metrics"
    return f"{url}/metrics"


def scrape_targets(book: InstanceBook, namespace: str, asked: str = "localhost") -> list[ScrapeTarget]:
    """The registered instances with a metrics page.

    Args:
        namespace: a label.
        asked: host and port at which the scraper reached this process. If that is no loopback address, the scraper is on
            another host, so this host's loopback pages are listed under the host's name.
    """
    is_local = is_loopback(urlsplit(f"//{asked}").hostname or "")
    own_host = socket.gethostname() if is_local else ""
    records = [record for role in ROLES for record in book.of_role(role)]
    pages = [(record, page_of(record, own_host)) for record in records]
    return [_target(record, url, namespace) for record, url in pages if url is not None]


def _target(record: InstanceRecord, url: str, namespace: str) -> ScrapeTarget:
    parts = urlsplit(url)
    labels = {
        "__scheme__": parts.scheme,
        "__metrics_path__": parts.path,
        "job": f"kvmesh-{record.role}",
        "instance": record.instance_id,
        "namespace": namespace,
        "host": record.host,
    }
    return ScrapeTarget([parts.netloc], labels | ({"model": record.model} if record.model else {}))
