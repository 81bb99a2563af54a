"""The bytes of the pages: one tensor, one contiguous piece a page, so that NIXL needs one descriptor a page."""

from typing import Final

import torch

from components.kv_transfer.layout import KvLayout
from engine.huge_pages import HugeMemory

TORCH_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def allocate_storage(layout: KvLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """Zeroed pool [num_pages, kv_heads, layers, 2, page_size, head_dim].

    Zeroed, because attention multiplies slots behind a request's end by a weight of 0, and 0 x NaN is NaN.
    """
    shape = (num_pages, layout.kv_heads, layout.layers, 2, layout.page_size, layout.head_dim)
    dtype = TORCH_DTYPES[layout.dtype]
    # a layer's share of a page is some kilobytes: where the system's pages are small, each is an address to look up
    return HugeMemory().take(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
