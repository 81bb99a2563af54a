"""The table of vLLM's flags: what it names here is there."""

import re
from pathlib import Path
from typing import Final

import typer

from components.settings import MeshSettings
from engine.config import EngineConfig
from services.frontend.config import FrontendSettings
from services.local.__main__ import app

TEXT: Final = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()


def test_every_variable_that_the_table_names_is_a_setting() -> None:
    known = {f"MESH_{name.upper()}" for name in MeshSettings.model_fields}
    known |= {f"MESH_FRONTEND_{name.upper()}" for name in FrontendSettings.model_fields}
    known |= {f"MESH_ENGINE__{name.upper()}" for name in EngineConfig.__dataclass_fields__}
    named = set(re.findall(r"MESH_\w*[A-Z]\b", TEXT))
    assert len(named) > 10
    assert named <= known


def test_every_option_that_the_table_names_is_one_of_services_local() -> None:
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    ours = [row.split("|")[2] for row in TEXT.splitlines() if row.startswith(("| `--", "| `VLLM"))]
    named = {option for column in ours for option in re.findall(r"--[a-z-]+", column)}
    assert len(named) > 10
    assert named <= options
