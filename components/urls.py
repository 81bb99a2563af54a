"""Hosts, users and passwords in URLs."""

import re
from base64 import b64encode
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

HTTP: Final = ("http", "https")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_USER_INFO: Final = re.compile(r"(?<![^,\s])(\w+://)?[^,\s]*@")


class Login(NamedTuple):
    user: str | None
    password: str | None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def basic(login: Login) -> str:
    """The value of an Authorization header, RFC 7617."""
    return f"Basic {b64encode(f'{login.user}:{login.password}'.encode()).decode()}"


def login_of(urls: str) -> Login:
    """The first login in a comma-separated list."""
    for url in urls.split(","):
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        if parts.username is not None or parts.password is not None:
            return Login(*(None if part is None else unquote(part) for part in (parts.username, parts.password)))
    return Login(None, None)


def without_password(urls: str) -> str:
    """Remove users and passwords from a comma-separated list."""
    return _USER_INFO.sub(r"\1", urls)


def checked_http_url(url: str) -> str:
    """Raises: ValueError, without the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    is_one = url.split() == [url] and "," not in host and "@" not in parts.path
    if parts.scheme not in HTTP or not host or not is_one or port == 0 or parts.query or parts.fragment:
        form = "give http://HOST:PORT or https://HOST:PORT, with a path if the server needs one"
        raise ValueError(form + _login_hint(url))
    return url


def _login_hint(url: str) -> str:
    return "; in a login write each of / ? # % [ ] in percent-encoding, such as %2F for /" if "@" in url else ""


def wants_tls(urls: str, plain: str, secure: str, variable: str) -> bool:
    """Return whether the addresses, comma-separated, have the scheme `secure`; without one, `plain` counts.

    Raises: ValueError, for another scheme, or for both: a process would use the unprotected one after a failure.
    """
    schemes = {url.strip().partition("://")[0] if "://" in url else plain for url in urls.split(",")}
    if wrong := schemes - {plain, secure}:
        known = f"{plain}:// or {secure}:// ({variable})"
        if not all(_SCHEME.fullmatch(scheme) for scheme in wrong):  # it may be a password
            raise ValueError(f"an address must begin with {known}")
        raise ValueError(f"{min(wrong)}:// is not {known}")
    if len(schemes) > 1:
        raise ValueError(f"some addresses are {plain}:// and some {secure}://; use {secure}:// for all ({variable})")
    return schemes == {secure}


def checked_etcd_urls(urls: str) -> str:
    """Raises: ValueError, for wrong or mixed schemes, and for an address without a host."""
    return _checked(urls, "http", "https", "MESH_ETCD_URL")


def checked_nats_urls(urls: str) -> str:
    """Raises: ValueError, as `checked_etcd_urls` does."""
    return _checked(urls, "nats", "tls", "MESH_NATS_URL")


def server_parts(url: str) -> SplitResult | None:
    """The parts of a server's address; None if no server can have it."""
    try:
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        is_possible = bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or an incomplete IPv6 address
        return None
    return parts if is_possible else None


def _checked(urls: str, plain: str, secure: str, variable: str) -> str:
    wants_tls(urls, plain, secure, variable)
    for url in urls.split(","):
        if server_parts(url) is None:
            form = f"each address must be {plain}://HOST:PORT or {secure}://HOST:PORT ({variable})"
            raise ValueError(form + _login_hint(url))
    return urls
