from pathlib import Path

import pytest

from engine.core.engine_core import EngineCore
from engine.kernels.native_library import KernelsUnavailable, load_kernels
from engine.model.load import LoadedModel
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import PIPELINE, load_tiny, make_engine, save_tiny


@pytest.fixture(scope="session", autouse=True)
def kernel() -> str | None:
    """Attention as users have it, in C++ where there is a compiler. Why not, where there is none."""
    try:
        load_kernels(Path("~/.cache/kvmesh"))
    except KernelsUnavailable as exc:
        return str(exc)
    return None


@pytest.fixture(scope="session")
def compile_home(kernel: str | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory to compile models in: without packages, with our own C++; inductor tries the compiler only once."""
    home = tmp_path_factory.mktemp("compiled")
    (home / "compile").mkdir()
    for library in Path("~/.cache/kvmesh/compile").expanduser().glob("*.so"):
        (home / "compile" / library.name).symlink_to(library)
    return home


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
