"""Errors that end a process before it serves."""

import sys
from typing import Final, NoReturn

from components.errors import MeshError

EX_CONFIG: Final = 78  # of sysexits.h: a restart does not help


class CannotServe(MeshError):
    """A later start may succeed."""


class WrongSettings(CannotServe):
    """The message names the setting to change."""


def refuse(message: str) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    ending = SystemExit(message)
    ending.code = EX_CONFIG
    raise ending
