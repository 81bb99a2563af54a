"""Which engine a model setting asks for. Only the one that is asked for is imported: torch takes seconds to load."""

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
    """What each of these modules has under the name `build_engine`."""

    def __call__(self, model: str, config: EngineConfig, state_dir: Path, progress: Progress) -> Engine:
        """An engine over `model`, on the thread that will step it, where it has one."""


def build_engine(model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent) -> Engine:
    """Build the engine that `model` asks for. To be called on the thread that will step it, where it has one.

    Raises: ModelUnavailable or UnsupportedModel, naming the model.
    """
    build = cast("Builder", import_module(MOCK if is_mock(model) else TORCH).build_engine)
    return build(model, config, state_dir, progress)


def has_thread(model: str, config: EngineConfig) -> bool:
    """Whether the engine is stepped on a thread of its own, as one must be whose steps keep a processor busy."""
    return not is_mock(model) or config.mock.thread
