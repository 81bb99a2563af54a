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
from tests.engine.interpreted import without_waste
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import PIPELINE, load_tiny, make_engine, save_tiny

EAGER_TO_COMPILE: Final = "import engine.compilation.build_package as b; b._lower_priority = lambda: None; b.main()"
# Skip what takes 5 s of a package but changes no result: optimised glue code, and tests of vector instructions.
QUICKLY: Final = {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.fixture(scope="session", autouse=True)
def kernel() -> str | None:
    """Use attention in C++, like users. Return why not, if there is no compiler."""
    try:
        load_kernels(Path("~/.cache/kvmesh"))
    except KernelsUnavailable as exc:
        return str(exc)
    return None


@pytest.fixture(scope="session", autouse=True)
def kernels_waste_no_time() -> Iterator[None]:
    with without_waste():
        yield


@pytest.fixture(scope="session")
def compile_home(kernel: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory for compiled models, with our C++ but without packages; inductor tries the compiler only once.

    The compiling process keeps its priority, or it would get no core on a busy machine.
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
    """The tiny model in fp32; its engines share weights, but not pages."""
    return load_tiny(tiny_dir)


@pytest.fixture(scope="session")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "windowed", FAMILIES["mistral-window"]())


@pytest.fixture(scope="session")
def windowed(windowed_dir: Path) -> LoadedModel:
    """A model whose layers attend to the last `WINDOW` keys."""
    return load_tiny(windowed_dir)


@pytest.fixture(params=["off", "on"])
def pipeline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let new engines run one step at a time, or plan ahead."""
    monkeypatch.setitem(PIPELINE, "pipeline", request.param)
    return request.param


@pytest.fixture
def engine(tiny: LoadedModel) -> EngineCore:
    return make_engine(tiny)
