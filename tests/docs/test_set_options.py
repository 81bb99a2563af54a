"""Commands in README and docs: their options and settings exist."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import typer

from services.local.__main__ import app
from services.local.options import settable

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_make_up_has_options_and_settings_that_exist(file: Path) -> None:
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    settings = {name for name, _, _ in settable()}
    for arguments in re.findall(r"make up ARGS='([^'…]*)'", file.read_text()):
        words = shlex.split(arguments)
        assert {word for word in words if word.startswith("--")} <= options, arguments
        given = {value.partition("=")[0] for word, value in pairwise(words) if word == "--set"}
        assert given <= settings, arguments
