"""Copies between host and device without waiting: a copy from pageable memory waits for enqueued work."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

LOOK_S: Final = 3e-4  # the next step is enqueued already


def to_device(
    values: torch.Tensor | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.generic],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy `values` in stream order; on a CPU the tensor may share their memory."""
    # numpy reads a list in half the time; torch keeps pinned memory until the device has read it
    host = torch.as_tensor(values if isinstance(values, torch.Tensor) else np.asarray(values), dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Return a copy, readable after a later `Arrival`; on a CPU `values` itself."""
    return values.to("cpu", non_blocking=True)


class Arrival:
    """The end of the work enqueued so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as torch ships it
            self._event.record(torch.cuda.current_stream(device))

    def wait_s(self) -> float:
        return 0.0 if self._event is None or self._event.query() else LOOK_S  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
