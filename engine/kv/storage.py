"""One tensor for all pages. Each page is contiguous, so that NIXL needs one descriptor per page."""

import os
from collections.abc import Mapping
from typing import Final

import torch

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.cpu.machine_memory import check_fits
from engine.device.huge_pages import HugeMemory
from engine.device.memory import fits_alone, lack_of_memory

ALLOCATOR_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SCATTERED: Final = ("expandable_segments:true", "backend:cudamallocasync")
TORCH_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def allocate_storage(layout: KvLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """Allocate a pool of zeros: a backend may multiply slots that were never written by 0, and 0 x NaN is NaN.

    Returns: [num_pages, kv_heads, layers, 2, page_size, head_dim].
    Raises: WrongSettings, if there is not enough memory; CannotServe, if other processes of a device hold it.
    """
    shape = (num_pages, layout.num_heads, layout.layers, 2, layout.page_size, layout.head_dim)
    dtype = TORCH_DTYPES[layout.dtype]
    if device.type == "cpu":
        check_fits(num_pages * layout.page_bytes, "settings engine.kv_memory_gb and engine.num_pages: KV pages")
        # huge pages save address translations
        return HugeMemory().take(shape, dtype)
    check_allocator(os.environ)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as exc:
        free, total = torch.cuda.mem_get_info(device)
        needed = num_pages * layout.page_bytes
        raise lack_of_memory(fits_alone(torch.cuda.memory_allocated(device) + needed, total))(
            f"settings engine.kv_memory_gb and engine.num_pages: KV pages take {needed / 1e9:.1f} GB, "
            f"and of the {total / 1e9:.1f} GB of {device} {free / 1e9:.1f} GB are free"
        ) from exc


def check_allocator(environment: Mapping[str, str]) -> None:
    """Check that the pool will be one allocation of `cudaMalloc`, because a peer maps it by its first address.

    Raises: WrongSettings, for allocators that assemble it from several allocations.
    """
    for name in ALLOCATOR_SETTINGS:
        value = environment.get(name, "")
        if any(setting in value.lower().replace(" ", "") for setting in SCATTERED):
            raise WrongSettings(
                f"{name}={value}: peers cannot map KV pages from such an allocator; remove expandable_segments and backend"
            )
