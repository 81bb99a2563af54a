"""What the options of `python -m services.local` become."""

import json
import re
import subprocess
import sys

import pytest
import typer

from services.local.__main__ import _adapters


def test_adapters_become_the_setting_of_both_kinds_of_workers() -> None:
    given = _adapters(["legal=adapters/legal", "org/m=/with=sign"])
    assert given is not None
    assert json.loads(given) == {"legal": "adapters/legal", "org/m": "/with=sign"}
    assert _adapters(None) is None


@pytest.mark.parametrize("given", ["legal", "=directory", "legal="])
def test_an_adapter_without_name_or_directory_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME=DIRECTORY"):
        _adapters([given])


def test_help_has_the_common_options_and_cuts_no_name() -> None:
    """At 80 columns variables were cut: MESH_FRONTEND_HOS…"""

    def said(option: str) -> str:
        command = [sys.executable, "-m", "services.local", option]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env={"COLUMNS": "80"}
        ).stdout

    short, full = said("--help"), said("--help-all")
    assert "MESH_FRONTEND_HOST;" in short
    assert len(short.splitlines()) < 75
    assert "MESH_FRONTEND_API_KEYS_FILE" in re.sub(r"\s", "", short)
    assert "--drain-timeout" in full
    assert "--drain-timeout" not in short
    assert "--help-all" in short
