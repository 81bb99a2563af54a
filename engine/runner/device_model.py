"""A model and its pages on one device."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend, StepShape
from engine.compilation.forward import Forward
from engine.device.copies import to_device
from engine.kv.offload_memory import PageCopies
from engine.lora.adapters import Adapters
from engine.runner.step_inputs import StepInputs


class StepModel(Protocol):
    """The model that computes steps, on one device or on all ranks of an instance."""

    @property
    def device(self) -> torch.device: ...

    @property
    def forward_kind(self) -> str: ...

    def compute(self, inputs: StepInputs, ahead_ids: torch.Tensor | None) -> torch.Tensor:
        """Enqueue a forward.

        Args:
            ahead_ids: int64, on the device: the tokens at `inputs.ahead`; None: there are none.
        Returns: logits or hidden states of the tokens at `inputs.keep`.
        """

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy pages, as `Runner.copy_pages` does."""

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback` once, on any thread, if another process of the instance is lost."""

    def close(self) -> None:
        """Stop the other processes of the instance."""


class DeviceModel:
    """Implements `StepModel`.

    Args:
        pages: of `attention`, and those that are evicted from there.
    """

    def __init__(
        self,
        device: torch.device,
        forward: Forward,
        attention: AttentionBackend,
        pages: PageCopies,
        adapters: Adapters,
    ) -> None:
        self.device = device
        self.forward = forward
        self._attention = attention
        self._pages = pages
        self._adapters = adapters

    @property
    def forward_kind(self) -> str:
        return self.forward.kind

    def compute(self, inputs: StepInputs, ahead_ids: torch.Tensor | None) -> torch.Tensor:
        ids = self._tensor(inputs.token_ids)
        if ahead_ids is not None:
            ids.index_copy_(0, self._tensor(inputs.ahead), ahead_ids)
        step = self._attention.plan(StepShape(inputs.query_lens, inputs.context_lens, inputs.block_tables))
        with self._adapters.of_rows(inputs.adapters):
            return self.forward(ids, self._tensor(inputs.positions), self._tensor(inputs.keep), step)

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        self._pages.copy(moves)

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(values, self.device, torch.int64)
