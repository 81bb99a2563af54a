"""Write a software bill of materials in the CycloneDX format: kvmesh, its Python packages and the page's scripts.

`make dist` lists the packages that kvmesh requires, as they are installed here. The image lists all that it has.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO: Final = Path(__file__).resolve().parents[1]
VENDORED: Final = Path("services/frontend/ui/static/vendor/README.txt")
SCRIPT: Final = re.compile(r"^(\S+) (\d\S*) \(([^)]+)\)", re.MULTILINE)  # preact 11.2.0 (MIT)
VERSION: Final = re.compile(r'^VERSION: Final = "(.+)"$', re.MULTILINE)

Bom = dict[str, Any]


def bill_of_materials(repo: Path, python: str | None = None) -> Bom:
    """Return the packages that kvmesh requires, as installed here; or all packages of an interpreter `python`.

    Args:
        repo: directory of kvmesh's sources.
        python: path of the interpreter.
    Raises: SystemExit, if a required package is missing.
    """
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--output-reproducible",
        "--no-validate",
        python or sys.executable,
    ]
    bom: Bom = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    version = VERSION.search((repo / "components/version.py").read_text())
    assert version is not None
    own = {"bom-ref": "kvmesh", "type": "application", "name": project["name"], "version": version[1]}
    own["licenses"] = [{"license": {"id": project["license"]}}]
    components = [one for one in bom["components"] if canonicalize_name(one["name"]) != project["name"]]
    refs = {canonicalize_name(one["name"]): one["bom-ref"] for one in components}
    direct = {canonicalize_name(one.name) for one in _wanted(project["dependencies"])}
    kept = set(refs) if python else _all_required(project["dependencies"])
    if missing := sorted((direct | kept) - set(refs)):
        raise SystemExit(f"not installed for {python or sys.executable}: {', '.join(missing)}")
    kept_refs = {refs[name] for name in kept}
    needs = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    scripts = _scripts(repo / VENDORED)
    bom["metadata"]["component"] = own
    bom["components"] = [one for one in components if one["bom-ref"] in kept_refs] + scripts
    own_needs = sorted([*(refs[name] for name in direct), *(one["bom-ref"] for one in scripts)])
    bom["dependencies"] = [{"ref": own["bom-ref"], "dependsOn": own_needs}] + [
        {"ref": ref, "dependsOn": sorted(set(needs.get(ref, ())) & kept_refs)} for ref in sorted(kept_refs)
    ]
    return bom


def _wanted(requirements: Iterable[str], extras: Iterable[str] = ("",)) -> list[Requirement]:
    """Return the requirements for this machine and these extras."""
    read = map(Requirement, requirements)
    return [one for one in read if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def _all_required(requirements: Iterable[str]) -> set[str]:
    """Return the packages that the requirements need, directly or not. Raises: PackageNotFoundError."""
    found: set[tuple[str, str]] = set()  # package, extra
    new = _wanted(requirements)
    while new:
        asked = {(canonicalize_name(one.name), extra) for one in new for extra in ("", *one.extras)} - found
        found |= asked
        new = [need for name, extra in asked for need in _wanted(requires(name) or (), (extra,))]
    return {name for name, _ in found}


def _scripts(readme: Path) -> list[Bom]:
    """Return the page's packages from npm, which its README lists."""
    return [
        {
            "bom-ref": f"npm:{name}@{version}",
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:npm/{name.lower()}@{version}",
            "licenses": [{"license": {"id": licence}}],
        }
        for name, version, licence in SCRIPT.findall(readme.read_text())
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python deploy/sbom.py", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--python", help="interpreter of which all packages are listed; default: the packages that kvmesh requires"
    )
    given = parser.parse_args(arguments)
    bom = bill_of_materials(REPO, given.python)
    given.output.write_text(json.dumps(bom, indent=1) + "\n")
    print(f"{given.output}: {len(bom['components'])} components")  # noqa: T201


if __name__ == "__main__":
    main()
