"""Instances of several ranks: this process leads, the followers are processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.build import assemble_led, prepare_model
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.parallel.followers import Followers
from tests.engine.tiny_engine import small


@dataclass(frozen=True)
class Led:
    loaded: LoadedModel
    followers: Followers

    def make(self, **changes: object) -> EngineCore:
        """A new engine: its own pages on each rank, the same weights."""
        return assemble_led(self.loaded, small(**self._settings(changes)), self.followers)

    def _settings(self, changes: dict[str, object]) -> dict[str, object]:
        return {"tensor_parallel": self.loaded.layout.shards, **changes}


@contextmanager
def led(directory: Path, size: int, **changes: object) -> Iterator[Led]:
    config = small(tensor_parallel=size, **changes)
    followers = Followers(str(directory), config, Path("~/.cache/kvmesh").expanduser())
    try:
        loaded = prepare_model(str(directory), config, Path("~/.cache/kvmesh").expanduser())
        followers.join(loaded.device)
        yield Led(loaded, followers)
    finally:
        followers.close()
