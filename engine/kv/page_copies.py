"""Copies of whole pages: within the pool, and between it and the memory for evicted pages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class PageCopies:
    """Copies pages by id: first come the ids of the pool, then those of offloaded pages.

    On a device, copies have their own stream: they run beside the step in flight, which uses none of their pages.
    """

    def __init__(self, storage: torch.Tensor, offloaded: torch.Tensor) -> None:
        """Both are [num_pages, ...]; `offloaded` is in main memory."""
        self._storage = storage
        self._offloaded = offloaded
        self._stream: torch.cuda.Stream | None = None
        if storage.device.type == "cuda":
            self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]  # as torch ships it

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages. Return only when all are copied, because a peer may then write to either page.

        Work on these pages in other streams must have ended, because this stream does not wait for it.
        """
        on_stream: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            on_stream = torch.cuda.stream(self._stream)
        with on_stream:
            for source, target in moves:
                self._page(target).copy_(self._page(source), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _page(self, page: int) -> torch.Tensor:
        in_pool = len(self._storage)
        return self._storage[page] if page < in_pool else self._offloaded[page - in_pool]
