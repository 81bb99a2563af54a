"""Addresses that may hold a password, shown without it."""

import re
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

_USER_INFO: Final = re.compile(r"(?<![^,\s])(\w+://)?[^,\s]*@")


class Login(NamedTuple):
    """What stands before the @ of a URL, percent-decoded."""

    user: str | None
    password: str | None


def login_of(urls: str) -> Login:
    """The user and password of the first URL that has some, of a comma-separated list."""
    for url in urls.split(","):
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        if parts.username is not None or parts.password is not None:
            return Login(*(None if part is None else unquote(part) for part in (parts.username, parts.password)))
    return Login(None, None)


def without_password(urls: str) -> str:
    """A comma-separated list of URLs without users and passwords, as it may stand in a log or an error message."""
    return _USER_INFO.sub(r"\1", urls)
