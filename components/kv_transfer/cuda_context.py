"""A CUDA context for the current thread."""

import torch


def open_context(device: str) -> None:
    """Make the context of `device`, such as cuda:1, current in this thread.

    Without a current context UCX may not find the GPU's memory and silently copy through host memory.
    """
    index = torch.device(device).index or 0
    torch.cuda.set_device(index)
    torch.cuda.current_stream(index).synchronize()  # the first call that needs the context makes it
