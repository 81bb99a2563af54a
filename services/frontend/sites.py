"""Which hosts and origins are answered where there are no API keys, so that pages of other sites cannot use the model.

A page may point its own host name at this machine (DNS rebinding). Then `Host` has that name. A page may also post here across
origins. Then `Origin` has its own. A host name with dots is answered only when it is known to be ours; one without dots cannot
be registered by others.
"""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from components.openai.errors import ApiError, from_status


class Sites:
    """The hosts by which clients may call this server, and the origins whose pages may."""

    def __init__(self, allowed_hosts: str | None, origins: str | None, listens_on: str = "") -> None:
        """`allowed_hosts` and `origins` are lists with commas, as the settings have them; `*` is any."""
        name = socket.gethostname().lower()
        self._hosts = {*_listed(allowed_hosts), name, f"{name}.local", listens_on.lower()}
        self._origins = {origin.rstrip("/") for origin in _listed(origins)}

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """Why a request with these headers is not answered; None: it is."""
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
                f"This server does not answer to the host '{called[:64]}'. If it is one of its names, list it in "
                "MESH_FRONTEND_ALLOWED_HOSTS (--allowed-hosts), or set API keys.",
            )
        if origin is not None and not self._may_ask(origin, called):
            return from_status(
                403,
                f"Pages of the origin '{origin[:64]}' may not ask. To let them, list it in "
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
    """In lower case, without its port and the dot that may end it; empty where there is none."""
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
    return host == "localhost" or host.endswith(".localhost") or (_is_address(host) and ip_address(host).is_loopback)
