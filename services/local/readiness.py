"""When the mesh serves, and what stands in the way before it starts."""

import asyncio
import http.client
import json
import socket
import time
from typing import Final

from services.local.children import Child
from services.local.output import Output
from services.local.plan import Plan, reachable
from services.local.process import CannotStart

PATIENCE_S: Final = 30.0  # how often to say what is still missing


def check_ports(plan: Plan) -> None:
    """Try to listen where the frontends will. Raises: CannotStart."""
    for host, port in plan.frontends:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except OSError as exc:
            raise CannotStart(
                f"cannot listen on {host}:{port} ({exc.strerror}): free it, or give another --port"
            ) from exc


async def until_ready(children: list[Child], plan: Plan, model: str | None, output: Output) -> list[str]:
    """Return once a request to any frontend would succeed: each child is ready and each frontend lists the model.

    `model` is the name to wait for; None: any. Returns: the models that every frontend lists.
    """
    told = time.monotonic()
    while True:
        missing = [child.spec.name for child in children if not child.ready.is_set()]
        if not missing:
            lists = await asyncio.gather(*(asyncio.to_thread(_models, *address) for address in plan.frontends))
            common = set.intersection(*map(set, lists))
            if common and (model is None or model in common):
                return [name for name in lists[0] if name in common]
            missing = ["the model in /v1/models"]
        if time.monotonic() - told > PATIENCE_S:
            told = time.monotonic()
            output.say("local", f"still waiting for {', '.join(missing)}", level="warning")
        await asyncio.sleep(0.05)


def _models(host: str, port: int) -> list[str]:
    connection = http.client.HTTPConnection(reachable(host).strip("[]"), port, timeout=2.0)
    try:
        connection.request("GET", "/v1/models")
        answer = json.loads(connection.getresponse().read())
        return [str(model["id"]) for model in answer["data"]]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return []
    finally:
        connection.close()
