"""When the mesh serves, and what stands in the way before it starts."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from urllib.parse import urlsplit

from components.listening import cannot_listen
from services.local.children import Child
from services.local.output import Output
from services.local.plan import Plan
from services.local.process import CannotStart

PATIENCE_S: Final = 30.0  # how often to say what is still missing


@contextmanager
def own_ports(plan: Plan) -> Iterator[None]:
    """The ports of the frontends are ours, until the block ends. Raises: CannotStart, when they are another's.

    Frontends that share a port do so with any process that shares it, another mesh's too. So whoever starts a mesh first
    tries to have the port alone; and holds a name that only one process can, which others find while nobody listens yet.
    """
    with ExitStack() as held:
        for host, port in plan.addresses:
            try:
                name = held.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0kvmesh {host or '0.0.0.0'}:{port}")  # noqa: S104 - a name, not an address
                family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    probe.listen()
            except OSError as exc:
                raise CannotStart(cannot_listen(host, port, exc)) from exc
        yield


async def until_ready(children: list[Child], model: str | None, output: Output) -> list[str]:
    """Return once a request to any frontend would succeed: each child is ready and each frontend lists the model.

    `model` is the name to wait for; None: any. Returns: the models that every frontend lists.
    """
    told = time.monotonic()
    while True:
        missing = [child.spec.name for child in children if not (child.ready.is_set() or child.leaving)]
        if not missing:
            pages = [child.metrics_url for child in children if child.spec.name.startswith("frontend-")]
            lists = await asyncio.gather(*(asyncio.to_thread(_models, page or "") for page in pages))
            common = set.intersection(*map(set, lists))
            if common and (model is None or model in common):
                return [name for name in lists[0] if name in common]
            missing = ["the model at every frontend"]
        if time.monotonic() - told > PATIENCE_S:
            told = time.monotonic()
            output.say("local", f"still waiting for {', '.join(missing)}", level="warning")
        await asyncio.sleep(0.05)


def _models(page: str) -> list[str]:
    """Those that a frontend has found, by its own page: it needs no API key, and behind a shared port tells of one alone."""
    address = urlsplit(page)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return [str(model) for model in json.loads(connection.getresponse().read())["models"]]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return []
    finally:
        connection.close()
