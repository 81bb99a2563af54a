"""Choose a KV transfer backend by name: ours, or an entry point of another package.

A name is `<backend>` or `<backend>/<plugin>`. Only the chosen backend's library is imported.
"""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import Final
from urllib.parse import urlsplit

from components.kv_transfer.backend import KvTransfer, OpenTransfer
from components.startup import WrongSettings
from components.wire.layout import KvRegion

GROUP: Final = "kvmesh.kv_transfer"
OURS: Final = {
    "nixl": "components.kv_transfer.nixl_transfer:open_nixl_plugin",
    "mooncake": "components.kv_transfer.mooncake_transfer:open_mooncake",
    "fake": "components.kv_transfer.fake_transfer:open_fake",
}


def known_backends() -> dict[str, EntryPoint]:
    theirs = {point.name: point for point in entry_points(group=GROUP)}
    return theirs | {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}


def check_name(setting: str) -> EntryPoint:
    name = setting.partition("/")[0]
    backends = known_backends()
    if name not in backends:
        raise WrongSettings(
            f"setting kv_transfer: no backend {name!r}; there are {', '.join(sorted(backends))}, and nixl/<PLUGIN>"
        )
    return backends[name]


def kv_opener(setting: str) -> Callable[[KvRegion, str, str, int], AbstractAsyncContextManager[KvTransfer]]:
    name, _, plugin = setting.partition("/")
    point = check_name(setting)
    try:
        opener: OpenTransfer = point.load()
    except (ImportError, AttributeError) as exc:
        raise WrongSettings(f"setting kv_transfer: {name!r} cannot be loaded: {exc}") from exc
    return lambda region, agent_name, host, pages: opener(
        region, agent_name, plugin=plugin, host=host, max_request_pages=pages
    )


def known_transport(backend: str) -> str:
    """A backend's transport, such as "tcp"; empty for UCX, which chooses one for each pair of processes."""
    return {"mooncake": "tcp", "fake": "none", "nixl/UCX": os.environ.get("UCX_TLS", "")}.get(backend, "")


def own_address(etcd_url: str) -> str:
    """This machine's address on the route to etcd, which other workers can reach, too."""
    parts = urlsplit(etcd_url.partition(",")[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 2379))
            return str(probe.getsockname()[0])
    except OSError:  # an unknown name, or only IPv6 addresses
        return "127.0.0.1"
