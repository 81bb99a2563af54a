"""Instances of several ranks: this process leads, the followers are forks, to save time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.build import assemble_led, prepare_model
from engine.config import FOLLOWER
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.parallel.followers import Followers
from tests.engine.parallel.forked_ranks import ForkingRanks
from tests.engine.tiny_engine import small

HOME = Path("~/.cache/kvmesh").expanduser()
FORKING = ForkingRanks()  # the directory's conftest ends it


@dataclass(frozen=True)
class Led:
    loaded: LoadedModel
    followers: Followers

    def make(self, **changes: object) -> EngineCore:
        """Make an engine with its own pages on each rank."""
        config = small(**{"tensor_parallel": self.loaded.layout.shards, **changes})
        return assemble_led(self.loaded, config, self.followers)


@contextmanager
def led(directory: Path, size: int, module: str = FOLLOWER, **changes: object) -> Iterator[Led]:
    config = small(tensor_parallel=size, **changes)
    with FORKING.in_use():
        followers = Followers(str(directory), config, HOME, module)
    try:
        loaded = prepare_model(str(directory), config, HOME)
        followers.join(loaded.device)
        yield Led(loaded, followers)
    finally:
        followers.close()
