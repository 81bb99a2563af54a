import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest

from engine.compilation import packages
from engine.core.engine_core import EngineCore
from engine.kernels.native_library import KernelsUnavailable, load_kernels
from engine.model.load import LoadedModel
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import PIPELINE, load_tiny, make_engine, save_tiny

EAGER_TO_COMPILE: Final = "import engine.compilation.build_package as b; b._lower_priority = lambda: None; b.main()"
# Leave out what takes 5 s of a package and changes no result: optimised glue code, and trying vector instructions.
QUICKLY: Final = {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.fixture(scope="session", autouse=True)
def kernel() -> str | None:
    """Attention as users have it, in C++ where there is a compiler. Why not, where there is none."""
    try:
        load_kernels(Path("~/.cache/kvmesh"))
    except KernelsUnavailable as exc:
        return str(exc)
    return None


@pytest.fixture(scope="session")
def compile_home(kernel: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory to compile models in: without packages, with our own C++; inductor tries the compiler only once.

    The compiling process does not step back: on a busy machine it would get no core, and the test runs out of time.
    """
    home = tmp_path_factory.mktemp("compiled")
    (home / "compile").mkdir()
    for library in Path("~/.cache/kvmesh/compile").expanduser().glob("*.so"):
        (home / "compile" / library.name).symlink_to(library)
    names = SimpleNamespace(PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL, Popen=_compiling)
    with mock.patch.object(packages, "subprocess", names):
        yield home


def _compiling(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    assert command[:3] == [sys.executable, "-m", "engine.compilation.build_package"]
    env = options.pop("env") | QUICKLY
    return subprocess.Popen([sys.executable, "-c", EAGER_TO_COMPILE, *command[3:]], env=env, **options)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> LoadedModel:
    """The tiny model in fp32; engines over it share its weights, not its pages."""
    return load_tiny(tiny_dir)


@pytest.fixture(scope="session")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "windowed", FAMILIES["mistral-window"]())


@pytest.fixture(scope="session")
def windowed(windowed_dir: Path) -> LoadedModel:
    """No layer sees more than the last `WINDOW` keys."""
    return load_tiny(windowed_dir)


@pytest.fixture(params=["off", "on"])
def pipeline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines made after it run one step at a time, or plan the next one while a step is in flight."""
    monkeypatch.setitem(PIPELINE, "pipeline", request.param)
    return request.param


@pytest.fixture
def engine(tiny: LoadedModel) -> EngineCore:
    return make_engine(tiny)
