"""Choose the engine by model setting. Only the chosen one is imported: torch takes seconds to load."""

from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from engine.config import EngineConfig
from engine.mock.text import is_mock
from engine.model.progress import Progress, silent
from engine.ports import Engine

TORCH: Final = "engine.build"
MOCK: Final = "engine.mock.build"


class Builder(Protocol):
    def __call__(self, model: str, config: EngineConfig, state_dir: Path, progress: Progress) -> Engine:
        pass


def build_engine(model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent) -> Engine:
    """Called on the thread that will step the engine, if it has one.

    Raises: ModelUnavailable, UnsupportedModel.
    """
    build = cast("Builder", import_module(MOCK if is_mock(model) else TORCH).build_engine)
    return build(model, config, state_dir, progress)


def has_thread(model: str, config: EngineConfig) -> bool:
    """Whether the engine has a thread of its own, as it must if its steps use a processor."""
    return not is_mock(model) or config.mock.thread
