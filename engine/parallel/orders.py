"""Orders from the leader to followers: the first one as JSON on standard input, then through the step line."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine.config import EngineConfig
from engine.runner.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a follower's standard input."""

    model: str
    state_dir: str
    config: EngineConfig
    rank: int
    store: str  # path for `join_group`
    memory: int  # file descriptors of the step line
    wakers: list[int]
    staging: int | None = None  # descriptor of memory for pages on their way to or from files

    def dump(self) -> str:
        return json.dumps(asdict(self), default=str)


def transfer_socket_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}"


class MakeModel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Allocate pages for model `number`, with these settings. An instance makes one model, a test many."""

    number: int
    config: str  # JSON


class Compute(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    inputs: StepInputs


class CopyPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    moves: Sequence[tuple[int, int]]  # source, target


Order = MakeModel | Compute | CopyPages
encoder: Final = msgspec.msgpack.Encoder()
decoder: Final = msgspec.msgpack.Decoder(Order)


class Report(msgspec.Struct, frozen=True):
    """A line of a follower's standard output, as JSON."""

    pid: int
    device: str = ""
    failure: str = ""  # why the follower ends
    is_setting: bool = False  # whether a setting causes the failure, so that another start would not help
    address: int = 0  # address of the pages of the latest model
    num_pages: int = 0
