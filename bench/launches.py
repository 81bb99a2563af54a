"""Count what a draw would launch on a device: kernels, and copies from and to the host."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling import device_sampler, logprobs
from engine.sampling.device_sampler import DeviceDraw, DeviceSampler
from engine.sampling.row import Row

COPIES: Final = (
    (device_sampler, "to_device"),
    (device_sampler, "to_host"),
    (logprobs, "to_device"),
    (logprobs, "to_host"),
)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch ships it
    """Counts operations that are neither views nor allocations, and copies, which a CPU does not make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._copying = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._copying and not func.is_view and "empty" not in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the block."""
        originals = [(module, name, getattr(module, name)) for module, name in COPIES]
        for module, name, original in originals:
            setattr(module, name, self._copy(original))
        try:
            with self:
                yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)

    def _copy(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def copy(*args: Any) -> torch.Tensor:
            self.count += 1
            self._copying = True
            try:
                return original(*args)
            finally:
                self._copying = False

        return copy


class LaunchesOnly(DeviceSampler):
    """The host's part of the device's sampler: in the kernel's place one operation draws token 1."""

    launches: Launches | None = None  # counts draws

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> DeviceDraw:
        if self.launches is None:
            return super().draw(logits, rows)
        with self.launches.counting():
            return super().draw(logits, rows)

    def _launch(self, logits: torch.Tensor, ids: torch.Tensor, masks: torch.Tensor) -> None:
        ids.fill_(1)
