"""The leader's followers on devices: their processes, their step line, and the process group."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter

from components.startup import CannotServe
from components.wire.layout import RankMemory
from engine.compilation.device import DeviceForward
from engine.config import FOLLOWER, EngineConfig
from engine.parallel.orders import Compute, CopyPages, MakeModel, Order, encoder
from engine.parallel.rank_processes import RankLost, RankProcesses
from engine.parallel.step_line import LineBroken, StepLine
from engine.runner.device_model import DeviceModel
from engine.runner.step_inputs import StepInputs
from engine.sharding.group import abort_group, from_leader, join_group, leave_group

log = logging.getLogger(__name__)

LOST_S: Final = 2.0  # time to detect the end of a follower after a step has failed
DONE_LOOK_S: Final = 1e-4  # polling interval


class Followers:
    """All followers of this process. Except for `on_loss`, call methods on the engine's thread only."""

    def __init__(self, model: str, config: EngineConfig, state_dir: Path, module: str = FOLLOWER) -> None:
        self._size = config.tensor_parallel
        self._line = line = StepLine.make(self._size)
        self.staging = os.memfd_create("kvmesh-staging")  # descriptor of memory that all ranks map
        self._processes = RankProcesses(
            model,
            config,
            state_dir,
            module,
            memory=line.memory,
            wakers=line.wakers,
            staging=self.staging,
            on_loss=abort_group,
        )
        self._num_models = 0

    def join(self, device: torch.device) -> None:
        """Wait until all followers have loaded, then form the group. Raises: WrongSettings, RankLost."""
        self._processes.reports()
        join_group(self._processes.store, 0, self._size, device)

    def make_models(self, config: EngineConfig) -> int:
        """Let the followers allocate pages, in parallel to this rank. Return the model's number."""
        self._num_models += 1
        self.send(MakeModel(self._num_models, TypeAdapter(EngineConfig).dump_json(config).decode()))
        return self._num_models

    def rank_memories(self) -> list[RankMemory]:
        return self._processes.rank_memories()

    def send(self, order: Order) -> None:
        """Raises: RankLost."""
        try:
            self._line.send(encoder.encode(order), self._processes.is_over)
        except LineBroken as exc:
            raise self._processes.lost or RankLost(str(exc)) from exc

    def wait_done(self) -> None:
        """Wait until the followers have executed all orders. Raises: RankLost."""
        while not self._line.is_done():
            if self._processes.is_over.wait(DONE_LOOK_S):
                raise self._processes.lost or RankLost("the followers have ended")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Guard a computation in which all ranks take part. Raises: RankLost, for any failure."""
        if self._processes.lost is not None:
            raise self._processes.lost
        try:
            yield
        except CannotServe:
            raise
        except Exception as exc:
            self._processes.is_over.wait(LOST_S)  # if a rank was lost, that is the cause
            if self._processes.lost is None:
                log.exception("rank 0 failed")
            raise self._processes.lost or RankLost(f"rank 0: {exc}") from exc

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        self._processes.on_loss(callback)

    def close(self) -> None:
        if self._processes.close():
            leave_group()
            self._line.close()
            os.close(self.staging)


class LedModel:
    """Implements `engine.runner.device_model.StepModel`: sends each call to the followers, then executes it here."""

    def __init__(self, own: DeviceModel, followers: Followers, number: int) -> None:
        self.device = own.device
        self._own = own
        self._followers = followers
        self._number = number

    @property
    def forward_kind(self) -> str:
        return self._own.forward_kind

    def compute(self, inputs: StepInputs, ahead_ids: torch.Tensor | None) -> torch.Tensor:
        """Compute a step on all ranks. Raises: RankLost, for any failure, because the ranks no longer agree."""
        with self._followers.together():
            self._followers.send(Compute(self._number, inputs))
            if ahead_ids is not None:
                from_leader(ahead_ids)
            return self._own.compute(inputs, ahead_ids)

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        with self._followers.together():
            self._followers.send(CopyPages(self._number, moves))
            self._own.copy_pages(moves)
            self._followers.wait_done()  # a page may be offered to a peer before the next step

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        self._followers.on_loss(callback)

    def close(self) -> None:
        if isinstance(self._own.forward, DeviceForward):
            self._own.forward.forget_graphs()  # NCCL cannot leave a group while graphs contain its sums
        self._followers.close()
