"""A thread's CUDA context, for libraries that use the one that they find."""

import torch


def open_context(device: str) -> None:
    """Make the context of `device`, such as cuda:1, the calling thread's own.

    UCX asks for the current context when it looks for ways to reach a GPU's memory. Without one it may find none and copy
    through host memory, many times slower, without an error.
    """
    index = torch.device(device).index or 0
    torch.cuda.set_device(index)
    torch.cuda.current_stream(index).synchronize()  # the context is made with the first call that needs it
