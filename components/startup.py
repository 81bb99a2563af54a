"""Reasons for a process to end before it serves: one line for the user, and an exit status for the supervisor."""

import sys
from typing import Final, NoReturn

from components.errors import MeshError

EX_CONFIG: Final = 78  # of sysexits.h: wrong settings, so a restart does not help


class CannotServe(MeshError):
    """The process cannot serve now, for example because its port is taken; another start may succeed."""


class WrongSettings(CannotServe):
    """The process cannot serve with these settings; the message names the one to change."""


def refuse(message: str) -> NoReturn:
    """Print `message` to stderr and exit with `EX_CONFIG`."""
    sys.stderr.write(f"{message}\n")
    ending = SystemExit(message)
    ending.code = EX_CONFIG
    raise ending
