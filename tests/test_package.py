"""The contents of the wheel and the sdist; the installed command works without the repository."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest

from bench.processes import free_port
from components.version import VERSION
from services.command.__main__ import COMMANDS
from tests.waiting import PATIENCE_S, wait_until

REPO: Final = Path(__file__).resolve().parents[1]
IN_THE_WHEEL: Final = ("bench", "components", "engine", "services")
MADE_BY_SETUPTOOLS: Final = re.compile(r"kvmesh-[\d.]+\.dist-info/|kvmesh\.egg-info/|(?:PKG-INFO|setup\.cfg)$")
READY: Final = re.compile(r"^Ready: (\S+)\n", re.MULTILINE)
OPTIONAL: Final = {"flashinfer", "mooncake", "matplotlib", "triton"}  # in a try, or of an extra


def in_git() -> set[str]:
    """Return the paths of committed files, and of new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and (REPO / name).is_file()}


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy, like `make dist`: a working tree may hold files of other builds."""
    source = tmp_path_factory.mktemp("source")
    for name in in_git():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, source / name)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "."], cwd=source, check=True, capture_output=True)
    [wheel], [sdist] = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


class Installed(NamedTuple):
    """An environment with the wheel, and a directory with packages of the same names."""

    bin: Path
    cwd: Path

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**self.environ(), **variables}
        return subprocess.run(
            [self.bin / command[0], *command[1:]], cwd=self.cwd, env=env, check=False, capture_output=True, text=True
        )

    def environ(self) -> dict[str, str]:
        left_out = ("MESH_", "PYTHON", "COV_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return {**env, "PATH": f"{sysconfig.get_path('scripts')}:{env['PATH']}"}  # nats-server is there


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """It has the wheel's kvmesh, and other packages of the running environment."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "env", with_pip=False, symlinks=True)
    python = home / "env/bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, str(built.wheel)], check=True, capture_output=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(home / "env")})
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site, "outer.pth").write_text("\n".join(sorted(paths)))
    for name in IN_THE_WHEEL:
        (home / "elsewhere" / name).mkdir(parents=True)
        (home / "elsewhere" / name / "__init__.py").write_text(f"raise SystemExit('another {name}')\n")
    return Installed(python.parent, home / "elsewhere")


def test_the_wheel_has_the_files_that_git_knows(built: Built) -> None:
    held = {name for name in zipfile.ZipFile(built.wheel).namelist() if not MADE_BY_SETUPTOOLS.match(name)}
    assert held == {name for name in in_git() if name.startswith(tuple(f"{top}/" for top in IN_THE_WHEEL))}
    assert {
        "engine/kernels/attention.cpp",
        "engine/kernels/tiles.h",
        "services/local/tether.py",
        "bench/peers/make_dynamo.sh",
    } <= held


def test_the_sdist_has_all_files_that_git_knows(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in files if not MADE_BY_SETUPTOOLS.match(name)} == in_git()


def test_the_version_is_the_same_everywhere(built: Built, installed: Installed) -> None:
    assert installed.run("kvmesh", "--version").stdout == f"kvmesh {VERSION}\n"
    assert built.wheel.name == f"kvmesh-{VERSION}-py3-none-any.whl"
    newest = re.search(r"^## \[([^]]+)\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION
    assert f"kvmesh-{VERSION}-" in (REPO / "docs/install.md").read_text()


@pytest.mark.parametrize("name", ["frontend", "inspect"])
def test_the_help_of_a_command_is_that_of_its_service(installed: Installed, name: str) -> None:
    shown = installed.run("kvmesh", name, "--help")
    of_service = installed.run("python", "-P", "-m", COMMANDS[name][0], "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"kvmesh {name} [" in shown.stdout
    assert shown.stdout == of_service.stdout.replace(f"python -m {COMMANDS[name][0]}", f"kvmesh {name}")


def test_every_command_is_a_module_that_can_be_run() -> None:
    assert [name for name, (module, _) in COMMANDS.items() if find_spec(f"{module}.__main__") is None] == []


def test_every_service_is_a_command() -> None:
    with_main = {f"services.{path.parent.name}" for path in (REPO / "services").glob("*/__main__.py")}
    assert with_main - {"services.command"} <= {module for module, _ in COMMANDS.values()}


@pytest.mark.mesh
def test_the_installed_command_runs_a_mesh_whatever_lies_in_the_working_directory(
    installed: Installed, tmp_path: Path
) -> None:
    """Its child processes, too, import the wheel's packages."""
    command = [installed.bin / "kvmesh", "up", "--model", "mock", "--port", str(free_port()), "--state-dir", tmp_path]
    log = tmp_path / "log"
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, cwd=installed.cwd, env=installed.environ(), stdout=stream, stderr=stream) as mesh,
    ):
        try:
            address = until_ready(mesh, log)
            body = {"model": "mock", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert f"{installed.bin}/kvmesh inspect workers" in log.read_text()
            seen = installed.run("kvmesh", "inspect", "workers", "--state-dir", str(tmp_path))
            assert "4 instances of mock" in seen.stdout, seen.stderr
        finally:
            mesh.send_signal(signal.SIGINT)
    assert mesh.returncode == 0, log.read_text()


def until_ready(mesh: subprocess.Popen[bytes], log: Path) -> str:
    """Return the mesh's address."""
    wait_until(lambda: mesh.poll() is not None or re.search(READY, log.read_text()), log.read_text)
    ready = re.search(READY, log.read_text())
    assert ready is not None, log.read_text()
    return ready[1]


def imported(package: str) -> Iterator[str]:
    """Yield the top-level names of other projects' modules that a package of ours imports."""
    for path in (REPO / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module).partition(".")[0]


def brought_by(names: set[str]) -> set[str]:
    """Return the distributions that `names` require, without extras."""
    found: set[str] = set()
    while names:
        found |= names
        wanted: set[str] = set()
        for name in names:
            try:
                requirements = distribution(name).requires or []
            except PackageNotFoundError:
                continue  # of another platform
            wanted |= {plain(line) for line in requirements if "extra ==" not in line}
        names = wanted - found
    return found


def plain(requirement: str) -> str:
    [name] = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_imported_package_comes_with_the_wheel(built: Built) -> None:
    """Without an extra."""
    metadata = zipfile.ZipFile(built.wheel).read(f"kvmesh-{VERSION}.dist-info/METADATA").decode()
    declared = {
        plain(line) for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) if "extra" not in line
    }
    come = brought_by(declared)
    providers = packages_distributions()
    names = {name for package in IN_THE_WHEEL for name in imported(package)}
    foreign = names - sys.stdlib_module_names - set(IN_THE_WHEEL) - OPTIONAL
    assert len(foreign) > 20
    assert [name for name in sorted(foreign) if not come & {plain(of) for of in providers.get(name, [])}] == []
