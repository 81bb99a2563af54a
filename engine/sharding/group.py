"""The process group of an instance's ranks: torch's default one, with NCCL on devices and gloo on CPUs."""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine.kernels.operators import define_operator

JOIN_S: Final = 120.0
LEAVE_S: Final = 5.0
_aborts: Final[list[threading.Thread]] = []  # at most one


def join_group(store: Path, rank: int, size: int, device: torch.device) -> None:
    """`store`: a path on this machine, the same for all ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whose name may not resolve
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=JOIN_S),
        device_id=device if device.type == "cuda" else None,
    )


def leave_group() -> None:
    """Leave, even if other ranks have ended. CUDA graphs with the group's sums must have been freed."""
    abort_group()
    while _aborts:
        _aborts.pop().join(LEAVE_S)
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()


def abort_group() -> None:
    """Release a thread that waits for a lost rank on a device; gloo detects the loss itself.

    Do not wait, because NCCL delays the abort while a CUDA graph has sums of the group.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl" and not _aborts:
        abort = dist.distributed_c10d._abort_process_group
        _aborts.append(threading.Thread(target=abort, name="abort group", daemon=True))
        _aborts[0].start()


def from_leader(values: torch.Tensor) -> torch.Tensor:
    """Overwrite `values` with those of rank 0."""
    dist.broadcast(values, 0)
    return values


def of_all_ranks(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Exchange equally many numbers of each rank. Return them by rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [each.tolist() for each in found]


def sum_over_ranks(y: torch.Tensor) -> torch.Tensor:
    """Sum `y` in place. All ranks get the same bits."""
    if torch.compiler.is_compiling():
        torch.ops.kvmesh.all_reduce(y)
    else:
        _all_reduce(y)
    return y


class Reduced(torch.nn.Module):
    """A linear layer whose inputs are cut, so the outputs of all ranks are summed."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(x)
        return sum_over_ranks(y)


def _all_reduce(y: torch.Tensor) -> None:
    dist.all_reduce(y)


define_operator("all_reduce(Tensor(a!) y) -> ()", _all_reduce, lambda _y: None)
