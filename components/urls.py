"""Users and passwords in URLs."""

import re
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

_USER_INFO: Final = re.compile(r"(?<![^,\s])(\w+://)?[^,\s]*@")


class Login(NamedTuple):
    user: str | None
    password: str | None


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
