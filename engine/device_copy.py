"""Values on their way between host and device, neither of which waits for the other.

A copy from ordinary host memory makes the host wait until the device has done everything that was enqueued before.
Nothing between the launch of one step and that of the next may do that, or the device would idle meanwhile.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

LOOK_S: Final = 3e-4  # the next step is enqueued already: a device that is done has work meanwhile


def to_device(
    values: torch.Tensor | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.generic],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor of `values` on `device`, in the order of its work; on a CPU it may share their memory.

    torch keeps the pinned memory that it comes from until the device has read it.
    """
    # by way of numpy, which reads a list in half the time
    host = torch.as_tensor(values if isinstance(values, torch.Tensor) else np.asarray(values), dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy of `values` that may be read once an `Arrival` made after it has been waited for; on a CPU, `values`."""
    return values.to("cpu", non_blocking=True)


class Arrival:
    """The moment when the device has done what was enqueued so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as torch ships it
            self._event.record(torch.cuda.current_stream(device))

    def wait_s(self) -> float:
        """After how long to ask again whether `wait` would come back at once; 0: it would."""
        return 0.0 if self._event is None or self._event.query() else LOOK_S  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Come back when it has; what is enqueued later is not waited for."""
        if self._event is not None:
            self._event.synchronize()
