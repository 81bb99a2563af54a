"""The list of all packages in CycloneDX, as `make dist` and the image write it."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from components.version import VERSION
from tests.conftest import REPO


def written(output: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "deploy/sbom.py", str(output), *options]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(output.read_text()))


@pytest.fixture(scope="module")
def bom(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return written(tmp_path_factory.mktemp("sbom") / "kvmesh.cdx.json")


def form(value: object, key: str = "") -> object:
    """Return its keys and types. Ids of licenses come from a closed list, so their values count too."""
    if isinstance(value, dict):
        return frozenset((name, form(item, name)) for name, item in value.items())
    if isinstance(value, list):
        return frozenset(form(item) for item in value)
    return value if key == "id" else type(value)


def test_it_is_valid_cyclonedx_about_this_version(bom: dict[str, Any]) -> None:
    """Validate one component of each form, as each takes 0.3 s."""
    one_of_each = list({form(one): one for one in bom["components"]}.values())
    cut = json.dumps(bom | {"components": one_of_each})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(cut) is None
    own = bom["metadata"]["component"]
    assert (own["name"], own["version"]) == ("kvmesh", VERSION)


def test_it_has_what_kvmesh_requires_with_versions_and_not_its_developers_tools(bom: dict[str, Any]) -> None:
    found = {one["name"].lower(): one["version"] for one in bom["components"]}
    for name in ("torch", "nixl", "nats-py", "pydantic", "pydantic_core", "h11"):  # the last two indirectly
        assert found[name] == version(name)
    assert found["uplot"]  # a script of the page
    assert not {"pytest", "mypy", "ruff", "matplotlib", "kvmesh"} & set(found)


def test_each_component_is_reached_from_kvmesh(bom: dict[str, Any]) -> None:
    needs = {one["ref"]: one["dependsOn"] for one in bom["dependencies"]}
    found, new = set[str](), {"kvmesh"}
    while new:
        found |= new
        new = {ref for one in new for ref in needs.get(one, ())} - found
    assert {one["bom-ref"] for one in bom["components"]} <= found


def test_of_an_interpreter_all_packages_are_listed(bom: dict[str, Any], tmp_path: Path) -> None:
    everything = written(tmp_path / "image.cdx.json", "--python", sys.executable)
    names = {one["name"] for one in everything["components"]}
    assert {one["name"] for one in bom["components"]} | {"pytest", "mypy"} <= names
