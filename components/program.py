"""How a process was started, and its replacement by another module."""

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

TYPED: Final = "typed"  # a -X option: unlike a variable, children do not inherit it


def program(default: str) -> str:
    """The command that the user typed: `default`, unless another program called `become`."""
    return str(sys._xoptions.get(TYPED, default))


def become(module: str, arguments: Sequence[str], typed: str) -> NoReturn:
    """Replace this process with `python -m module`. The process id stays."""
    os.execv(sys.executable, [sys.executable, "-X", f"{TYPED}={typed}", "-m", module, *arguments])  # noqa: S606  # it is our own
