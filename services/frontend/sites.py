"""Allowed hosts and origins while no API keys are set, so that other web sites' pages cannot use the model.

A page may point its own host name at this machine (DNS rebinding); then `Host` has that name. A page may also send requests
across origins; then `Origin` has its own. A host name with dots must be listed or known to be ours. A name without dots cannot
be registered by others.
"""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from components.openai.errors import ApiError, from_status
from components.urls import is_loopback


class Sites:
    def __init__(self, allowed_hosts: str | None, origins: str | None, listens_on: str) -> None:
        """`allowed_hosts` and `origins` are comma-separated lists; `*` allows any."""
        name = socket.gethostname().lower()
        self._hosts = {*_listed(allowed_hosts), name, f"{name}.local", listens_on.lower()}
        self._origins = {origin.rstrip("/") for origin in _listed(origins)}

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """Return why a request with these headers is refused, or None."""
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1").lower()
        called = "" if host is None else _host_of(f"//{host}")
        if host is not None and not self._is_ours(called):
            return from_status(
                403,
                f"The host '{called[:64]}' is not allowed. If it is a name of this server, list it in "
                "MESH_FRONTEND_ALLOWED_HOSTS (--allowed-hosts), or set API keys.",
            )
        if origin is not None and not self._may_ask(origin, called):
            return from_status(
                403,
                f"The origin '{origin[:64]}' is not allowed. To allow its pages, list it in "
                "MESH_FRONTEND_CORS_ORIGINS (--cors-origins).",
            )
        return None

    def _is_ours(self, host: str) -> bool:
        if not host:
            return False
        if (
            "." not in host
            or _is_address(host)
            or host.endswith(".localhost")
            or not self._hosts.isdisjoint({host, "*"})
        ):
            return True
        parents = host.split(".")[1:]
        return any("*." + ".".join(parents[i:]) in self._hosts for i in range(len(parents)))

    def _may_ask(self, origin: str, called: str) -> bool:
        host = _host_of(origin)
        return bool(host and (host == called or _is_loopback(host))) or not self._origins.isdisjoint({origin, "*"})


def _listed(text: str | None) -> list[str]:
    return [item.strip().lower() for item in (text or "").split(",") if item.strip()]


def _host_of(url: str) -> str:
    """Return a URL's host in lower case, without port and final dot; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.endswith(".localhost") or is_loopback(host)
