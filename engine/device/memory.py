"""What holds a device's memory, and the rest for KV pages."""

import gc
from dataclasses import asdict, dataclass, replace
from typing import Final, Protocol

import torch

from components.startup import CannotServe, WrongSettings
from engine.config import StepSize

SMALLER: Final = (
    "lower engine.max_step_tokens or engine.max_running, or divide the model over more devices "
    "by engine.tensor_parallel"
)
BESIDE_OTHERS: Final = "end other processes on this device, or choose another one"
KEPT_FREE: Final = 0.02  # share of the device that no pool takes


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one moment."""

    total: int  # of the device
    free: int  # held by no process
    own: int  # held by this process's tensors


class DeviceMemory(Protocol):
    def measure(self) -> MemoryReading:
        """Give back cached memory, then measure."""

    def start_peak(self) -> None: ...

    def peak(self) -> int:
        """The most that this process's tensors have held since `start_peak`, with cached memory."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self) -> MemoryReading:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(total, free, torch.cuda.memory_reserved(self._device))

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes before KV pages are allocated."""

    total: int
    free: int  # with weights and compiled products in place
    weights: int
    compiled: int  # merged products, tables, what a compiler keeps
    activations: int  # of the largest step
    graphs: int

    @property
    def outside(self) -> int:
        """Bytes of CUDA itself and of other processes."""
        return self.total - self.free - self.weights - self.compiled

    @property
    def coming(self) -> int:
        return self.activations + self.graphs

    def share_left(self, utilization: float) -> int:
        """Bytes left of this process's share, perhaps negative."""
        return int(utilization * self.total) - self.weights - self.compiled - self.coming

    @property
    def free_left(self) -> int:
        """Bytes left on the device, perhaps negative."""
        return self.free - self.coming - int(KEPT_FREE * self.total)

    def left(self, utilization: float) -> int:
        """Bytes for KV pages, perhaps negative."""
        return min(self.share_left(utilization), self.free_left)

    def by_others(self, utilization: float, needed: int = 0) -> bool:
        """Return whether this process's share has `needed` bytes, but other processes hold a part of it."""
        return self.free_left < self.share_left(utilization) >= needed

    def shortage(self, needed: int, utilization: float) -> str:
        left = self.left(utilization)
        held = (
            f"weights hold {_gb(self.weights)}, compiled products {_gb(self.compiled)}, the largest step "
            f"{_gb(self.activations)}, CUDA graphs {_gb(self.graphs)}, other processes and CUDA itself {_gb(self.outside)}"
        )
        cure = (
            BESIDE_OTHERS if self.by_others(utilization, needed) else f"raise engine.gpu_memory_utilization, {SMALLER}"
        )
        return (
            f"KV pages for one request need {_gb(needed)}, {_gb(max(0, left))} are left, so {_gb(needed - left)} are "
            f"missing. Of {_gb(self.total)} this worker may use {utilization:.0%}; {held}. To do: {cure}"
        )

    def step_too_large(self, device: str, size: StepSize, reason: str) -> str:
        return (
            f"too little memory on {device}: the largest step, {size.tokens} tokens and {size.requests} draws, does not fit "
            f"beside weights of {_gb(self.weights)}; {_gb(self.free)} were free ({reason}). To do: {SMALLER}, or "
            f"{BESIDE_OTHERS}"
        )

    def facts(self) -> dict[str, float]:
        """For the log, in 10^9 bytes."""
        facts = {f"{name}_gb": round(value / 1e9, 2) for name, value in asdict(self).items() if name != "free"}
        return facts | {"outside_gb": round(self.outside / 1e9, 2)}

    def with_step(self, activations: int, graphs: int) -> "MemoryUse":
        return replace(self, activations=max(0, activations), graphs=max(0, graphs))


def lack_of_memory(by_others: bool) -> type[CannotServe]:
    """Return the error's class. A later start may find memory of other processes free: that of a killed one returns late."""
    return CannotServe if by_others else WrongSettings


def fits_alone(num_bytes: int, total: int) -> bool:
    """Return whether a device of `total` bytes would have room without other processes."""
    return num_bytes <= (1 - KEPT_FREE) * total


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
