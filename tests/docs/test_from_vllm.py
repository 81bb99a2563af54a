"""The table of vLLM's flags: every option, setting and variable that it names exists."""

import re
from pathlib import Path
from typing import Final

import typer

from services.local.__main__ import app
from services.local.options import settable

TEXT: Final = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()
OURS: Final = [row.split("|")[2] for row in TEXT.splitlines() if row.startswith(("| `--", "| `VLLM"))]


def test_every_setting_that_the_table_names_is_one_that_set_takes() -> None:
    names = {name for name, _, _ in settable()}
    named = {name for column in OURS for name in re.findall(r"`([a-z][a-z_.]+)(?:=\w+)?`", column)}
    assert len(named) > 15
    assert named <= names


def test_every_variable_that_the_text_names_is_one() -> None:
    named = set(re.findall(r"MESH_\w*[A-Z]\b", TEXT))
    assert named <= {variable for _, variable, _ in settable()} | {"MESH_FRONTEND_API_KEYS"}


def test_every_option_that_the_table_names_is_one_of_services_local() -> None:
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    named = {option for column in OURS for option in re.findall(r"--[a-z-]+", column)}
    assert len(named) > 5
    assert named <= options
