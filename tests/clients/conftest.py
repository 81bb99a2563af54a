"""Packages that users bring, each in an environment of its own under build/, and a mesh for them to ask."""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.mesh.harness import MeshProcesses

REPO: Final = Path(__file__).resolve().parents[2]
BUILD: Final = REPO / "build" / "clients"
CLIENTS_MODEL: Final = os.environ.get("CLIENTS_MODEL", "mock:smollm2-135m")
SERVED: Final = "smollm2-135m"
MOCK: Final = {
    "MESH_ENGINE__NUM_PAGES": "2048",
    "MESH_ENGINE__MOCK__SPEEDUP": "4",  # slow enough for streams of many pieces
    "MESH_ENGINE__MOCK__ANSWER_TOKENS": "30",
}
REAL: Final = {"MESH_ENGINE__THREADS": "1", "MESH_ENGINE__COMPILE": "off"}  # two workers, two cores


@pytest.fixture(scope="session")
def client_mesh(
    etcd_url: str, nats_url: str, tmp_path_factory: pytest.TempPathFactory, real_model_dir: Path
) -> Iterator[str]:
    """Base URL of a mesh that computes every prompt on its prefill worker."""
    shared = {
        "MESH_SERVED_MODEL_NAME": SERVED,
        "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
        "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    }
    assert CLIENTS_MODEL in (SERVED, f"mock:{SERVED}"), "CLIENTS_MODEL is neither"
    mocked = CLIENTS_MODEL != SERVED
    env = shared | (MOCK if mocked else REAL)
    model = f"mock:{real_model_dir}" if mocked else str(real_model_dir)
    home = tmp_path_factory.mktemp("clients")
    with MeshProcesses(etcd_url, nats_url, f"clients-{secrets.token_hex(3)}", home, model, env) as mesh:
        mesh.start("bootstrap", "prefill", "decode", "frontend")
        yield mesh.one("frontend").url


@pytest.fixture(scope="session")
def agent_mesh(
    etcd_url: str, nats_url: str, tmp_path_factory: pytest.TempPathFactory, real_model_dir: Path
) -> Iterator[str]:
    """Base URL of a mock with a long context, because an agent's first prompt has up to 20,000 tokens."""
    model = tmp_path_factory.mktemp("long")
    for file in (path for path in real_model_dir.iterdir() if path.suffix in {".json", ".jinja"}):
        shutil.copy(file, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    env = MOCK | {
        "MESH_SERVED_MODEL_NAME": SERVED,
        "MESH_ENGINE__NUM_PAGES": "8192",
        "MESH_ENGINE__MOCK__SPEEDUP": "50",
    }
    home = tmp_path_factory.mktemp("agents")
    with MeshProcesses(etcd_url, nats_url, f"agents-{secrets.token_hex(3)}", home, f"mock:{model}", env) as mesh:
        mesh.start("bootstrap", "prefill", "decode", "frontend")
        yield mesh.one("frontend").url


@pytest.fixture(scope="session")
def client_python() -> Path:
    """The interpreter that has the packages of requirements.txt."""
    return _environment("python", "requirements.txt")


@pytest.fixture(scope="session")
def aiperf() -> Path:
    """The command; in an environment of its own, because it pins what others use."""
    return _environment("aiperf", "aiperf-requirements.txt").with_name("aiperf")


@pytest.fixture(scope="session")
def lm_eval() -> Path:
    """The command; in an environment of its own, because it brings a hundred packages."""
    return _environment("lm-eval", "lm-eval-requirements.txt").with_name("lm_eval")


@pytest.fixture(scope="session")
def phoenix() -> Path:
    """The command; in an environment of its own, because it brings a hundred packages. PHOENIX names an installed one."""
    given = os.environ.get("PHOENIX")
    return Path(given) if given else _environment("phoenix", "phoenix-requirements.txt").with_name("phoenix")


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A directory for NODE_PATH with the packages of package.json."""
    return _modules("node", "package.json")


@pytest.fixture(scope="session")
def agent_modules() -> Path:
    """The packages of agents-package.json; in a directory of their own, because they bring large programs."""
    return _modules("agents", "agents-package.json")


def _modules(name: str, listed: str) -> Path:
    for command, package in (("node", "nodejs"), ("npm", "npm")):
        if shutil.which(command) is None:
            pytest.skip(f"needs {command} (on Debian: apt install {package})")
    wanted, home = Path(__file__).with_name(listed), BUILD / name
    home.mkdir(parents=True, exist_ok=True)
    if not _is(home / "set-up", wanted):
        shutil.copy(wanted, home / "package.json")
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=home, check=True)
        shutil.copy(wanted, home / "set-up")
    return home / "node_modules"


def _environment(name: str, requirements: str) -> Path:
    """Its python; made when there is none with these requirements."""
    wanted, home = Path(__file__).with_name(requirements), BUILD / name
    python = home / "bin" / "python"
    if not _is(home / "set-up", wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", wanted]
        subprocess.run(pip, check=True)
        shutil.copy(wanted, home / "set-up")
    return python


def _is(done: Path, wanted: Path) -> bool:
    return done.exists() and done.read_text() == wanted.read_text()
