"""Addresses that may hold a password, shown without it."""

import re
from typing import Final

_USER_INFO: Final = re.compile(r"(?<![^,\s])(\w+://)?[^,\s]*@")


def without_password(urls: str) -> str:
    """A comma-separated list of URLs without users and passwords, as it may stand in a log or an error message."""
    return _USER_INFO.sub(r"\1", urls)
