"""Read pages of a GPU, gathered there for one copy; and a CUDA context for the current thread."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from components.kv_transfer.page_reader import PageArray
from components.wire.layout import KvRegion

BATCH_BYTES: Final = 32 << 20  # per copy, and of the device's memory


class DevicePages:
    def __init__(self, pool: torch.Tensor, batch_bytes: int = BATCH_BYTES) -> None:
        """`pool` is uint8 [pages, stripes, page_size, row_bytes]."""
        self._pool = pool
        self._batch = max(1, batch_bytes // max(1, pool[0].numel()))
        # the model and reads would wait for each other on one stream
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]

    def read(self, pages: Sequence[int]) -> Iterator[PageArray]:
        for first in range(0, len(pages), self._batch):
            yield from self._copy(pages[first : first + self._batch]).numpy()

    def _copy(self, pages: Sequence[int]) -> torch.Tensor:
        if self._stream is not None:  # a thread starts on GPU 0; a return to its stream would open a context there
            torch.cuda.set_device(self._pool.device)
        shape = (len(pages), *self._pool.shape[1:])
        with self._on_own_stream():
            gathered = self._pool.index_select(0, torch.tensor(pages, device=self._pool.device))
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pool.is_cuda)
            host.copy_(gathered, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return host

    def _on_own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Memory:
    def __init__(self, region: KvRegion) -> None:
        layout = region.layout
        self.__cuda_array_interface__ = {
            "shape": (region.num_pages, layout.num_stripes, layout.page_size, layout.row_bytes),
            "typestr": "|u1",
            "data": (region.address, False),
            "strides": None,
            "version": 3,
        }


def at(region: KvRegion) -> torch.Tensor:
    return torch.as_tensor(_Memory(region), device=region.device)


def open_device_pages(region: KvRegion) -> DevicePages:
    return DevicePages(at(region))


def open_context(device: str) -> None:
    """Make a context current in this thread, because without one UCX may silently copy through host memory."""
    index = torch.device(device).index or 0
    torch.cuda.set_device(index)
    torch.cuda.current_stream(index).synchronize()  # creates the context
