"""The model of an instance with followers: each call goes to them first, then to the leader's own part."""

from collections.abc import Callable, Sequence

import torch

from engine.compilation.device import DeviceForward
from engine.parallel.followers import Followers
from engine.parallel.orders import Compute, CopyPages
from engine.runner.device_model import DeviceModel
from engine.runner.step_inputs import StepInputs
from engine.sharding.group import from_leader


class LedModel:
    """Implements `engine.runner.device_model.StepModel`; the followers made their parts as model `number`."""

    def __init__(self, own: DeviceModel, followers: Followers, number: int) -> None:
        self.device = own.device
        self._own = own
        self._followers = followers
        self._number = number

    @property
    def forward_kind(self) -> str:
        return self._own.forward_kind

    def compute(self, inputs: StepInputs, ahead_ids: torch.Tensor | None) -> torch.Tensor:
        """Raises: RankLost, for any failure: the ranks no longer agree."""
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
            self._own.forward.forget_graphs()  # NCCL leaves no group while they hold sums of it
        self._followers.close()
