"""Each claim of docs/security.md names an existing test."""

import re
from pathlib import Path
from typing import Final

import pytest

from components.permissions import ROLES
from components.settings import MeshSettings
from components.settings_help import settings_in, variable

TESTS: Final = Path(__file__).resolve().parents[1]
TEXT: Final = (TESTS.parent / "docs" / "security.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", TEXT))))
def test_a_test_that_the_page_names_exists(name: str) -> None:
    pattern = re.compile(rf"^(?:async )?def {name}\(", re.MULTILINE)
    assert any(pattern.search(path.read_text()) for path in TESTS.rglob("test_*.py"))


def test_the_page_has_a_row_for_each_role() -> None:
    table = TEXT.partition("| credential of |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) == set(ROLES)


def test_every_variable_that_the_page_names_is_one() -> None:
    known = {variable(setting.path, "x", frozenset(MeshSettings.model_fields)) for setting in settings_in(MeshSettings)}
    named = {
        name
        for name in re.findall(r"`(MESH_[A-Z_]+[A-Z])`", TEXT)
        if not name.startswith(("MESH_FRONTEND", "MESH_DECODE", "MESH_OBSERVER"))
    }
    assert len(named) > 8
    assert named <= known | {"MESH_KV_TRANSFER_HOST", "MESH_METRICS_HOST"}
