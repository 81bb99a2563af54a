"""Why a process ends before it serves: one line for the person at the terminal, and an exit status for its supervisor."""

import sys
from typing import Final, NoReturn

from components.errors import MeshError

EX_CONFIG: Final = 78  # of sysexits.h: the settings are wrong, so another start would end the same way


class CannotServe(MeshError):
    """The process cannot serve as things are, such as with its port taken; another start may succeed."""


class WrongSettings(CannotServe):
    """The process cannot serve with these settings; the message names the one to change."""


def refuse(message: str) -> NoReturn:
    """End the process with `message` on stderr and `EX_CONFIG`."""
    sys.stderr.write(f"{message}\n")
    ending = SystemExit(message)
    ending.code = EX_CONFIG
    raise ending
