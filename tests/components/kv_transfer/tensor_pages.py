"""A page pool in a tensor, of any device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.components.kv_transfer.nixl_peer import Pages


@dataclass
class TensorPages(Pages):
    def __post_init__(self) -> None:
        self.tensor = torch.zeros((self.num_pages, self.layout.page_bytes), dtype=torch.uint8, device=self.device)

    @property
    def memory(self) -> NDArray[np.uint8]:  # type: ignore[override]
        """The pages on a CPU, else a copy."""
        host: NDArray[Any] = self.tensor.cpu().numpy()
        return host

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def fill(self, seed: int) -> None:
        drawn = np.random.default_rng(seed).integers(0, 256, self.tensor.shape, dtype=np.uint8)
        self.tensor.copy_(torch.from_numpy(drawn))
        self._wait()

    def set_all(self, value: int) -> None:
        self.tensor.fill_(value)
        self._wait()

    def _wait(self) -> None:
        """NIXL does not wait for streams."""
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
