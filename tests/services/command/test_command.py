"""`kvmesh`: completion of its commands and options, and the time that its help takes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import typer

from components.settings import WITH_SETTINGS
from components.settings_help import settings_in
from services.command.__main__ import COMMANDS
from services.command.completion import app_of_settings
from services.frontend.config import FrontendSettings

REPO: Final = Path(__file__).resolve().parents[3]
PROGRAM: Final = "import sys; sys.argv[0] = 'kvmesh'; from services.command.__main__ import app; app()"
SLOW: Final = ("torch", "pydantic", "asyncio", "rich.console")


def python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPO), **variables}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, check=True, capture_output=True, text=True
    )


def completed(line: str) -> list[str]:
    words = line.split(" ")
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_KVMESH_COMPLETE": "complete_bash"}
    return python(PROGRAM, **variables).stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvmesh ", list(COMMANDS)),
        ("kvmesh pre", ["prefill"]),
        ("kvmesh up --mod", ["--model"]),
        ("kvmesh inspect work", ["workers"]),
        ("kvmesh inspect trace --wi", ["--wide"]),
        ("kvmesh frontend --tls-", ["--tls-cert", "--tls-key"]),
        ("kvmesh decode --log-format j", ["json"]),
        ("kvmesh bench tr", ["transfer"]),
    ],
)
def test_a_shell_completes(typed: str, offered: list[str]) -> None:
    assert completed(typed) == offered


def test_every_setting_is_completed() -> None:
    options = {
        name
        for parameter in typer.main.get_command(app_of_settings(FrontendSettings)).params
        for name in parameter.opts
    }
    assert {f"--{setting.path.replace('_', '-')}" for setting in settings_in(FrontendSettings)} <= options


def test_help_imports_nothing_slow() -> None:
    """It took 50 ms; pydantic alone takes as long, torch a second."""
    program = f"{PROGRAM[:-5]}app(standalone_mode=False); print([name for name in {SLOW} if name in sys.modules])"
    shown = python(program, "--help").stdout
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert shown.endswith("[]\n")


def test_roles_with_settings_are_commands() -> None:
    assert set(WITH_SETTINGS) <= set(COMMANDS)
