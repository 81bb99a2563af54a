"""The bytes of the pages: one tensor, one contiguous piece a page, so that NIXL needs one descriptor a page."""

from typing import Final

import torch

from components.kv_transfer.layout import KvLayout

TORCH_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def allocate_storage(layout: KvLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """Zeroed pool [num_pages, kv_heads, layers, 2, page_size, head_dim].

    Zeroed, because attention multiplies slots behind a request's end by a weight of 0, and 0 x NaN is NaN.
    """
    shape = (num_pages, layout.kv_heads, layout.layers, 2, layout.page_size, layout.head_dim)
    return torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
