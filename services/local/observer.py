"""The observer of a local mesh: spans of all its processes end there."""

import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from components.certificates import TlsFiles
from components.startup import WrongSettings
from services.local.children import ChildSpec, Supervision, running_children
from services.local.free_ports import free_ports
from services.local.plan import Plan, reachable

NAME: Final = "observer-0"
USER: Final = "kvmesh"


def with_observer(plan: Plan) -> tuple[Plan, ChildSpec | None]:
    """The plan whose children send their spans to a new observer. No observer if another receiver is set.

    If no token is set, each run makes a new one, because all users of this machine can reach loopback ports.

    Raises: WrongSettings.
    """
    if plan.settings.otlp_endpoint is not None:
        return plan, None
    settings = plan.observer
    port = settings.port if "port" in settings.model_fields_set else _free_port(settings.host)
    token = settings.token.get_secret_value() if settings.token is not None else secrets.token_urlsafe(24)
    scheme = "https" if plan.secure or settings.tls_cert is not None else "http"
    endpoint = f"{scheme}://{USER}:{token}@{reachable(settings.host)}:{port}"
    env = {
        **os.environ,
        "MESH_STATE_DIR": str(plan.settings.home),
        "MESH_LOG_FORMAT": "json",
        "MESH_OBSERVER_PORT": str(port),
        "MESH_OBSERVER_TOKEN": token,
        "PYTHONUNBUFFERED": "1",
    }
    return replace(plan, otlp_endpoint=endpoint), ChildSpec(NAME, [sys.executable, "-m", "services.observer"], env)


def with_certificate(spec: ChildSpec, tls: TlsFiles | None) -> ChildSpec:
    assert tls is not None, "with --secure each server has one"
    files = {"MESH_OBSERVER_TLS_CERT": str(tls.certificate), "MESH_OBSERVER_TLS_KEY": str(tls.key)}
    return replace(spec, env={**spec.env, **files})


@asynccontextmanager
async def running_observer(spec: ChildSpec | None, supervision: Supervision) -> AsyncIterator[None]:
    """Run the observer. The mesh works without it, too: then each process writes its spans into the file itself."""
    async with running_children([], supervision) as tier:
        if spec is not None:
            tier.start(spec, essential=False)
        yield


def _free_port(host: str) -> int:
    try:
        (port,) = free_ports(1, host)
    except (OSError, UnicodeError) as exc:
        raise WrongSettings(
            f"setting host of observer: {host!r} is not an address of this machine; give one that it has"
        ) from exc
    return port
