"""A CUDA context for the current thread."""

import torch


def open_context(device: str) -> None:
    """Make a context current in this thread, because without one UCX may silently copy through host memory."""
    index = torch.device(device).index or 0
    torch.cuda.set_device(index)
    torch.cuda.current_stream(index).synchronize()  # the first call that needs the context creates it
