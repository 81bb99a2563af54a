"""The bytes of pages, wherever the pool is, as an array in main memory."""

import ctypes
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.errors import Rejected
from components.kv_transfer.backend import PageRegion

PageArray = NDArray[np.uint8]  # [stripes, page_size, row_bytes]


class PageReader(Protocol):
    """Reads pages of one pool, which must outlive it; several threads may."""

    def read(self, pages: Sequence[int]) -> Iterator[PageArray]:
        """Each page in turn, to be looked at before the next one is asked for: it may be the pool itself."""


class HostPages:
    """Pages in main memory, read where they lie."""

    def __init__(self, region: PageRegion) -> None:
        layout = region.layout
        pool = (ctypes.c_ubyte * (region.num_pages * layout.page_bytes)).from_address(region.address)
        shape = (region.num_pages, layout.num_stripes, layout.page_size, layout.row_bytes)
        self._pool = np.frombuffer(memoryview(pool).cast("B"), dtype=np.uint8).reshape(shape)

    def read(self, pages: Sequence[int]) -> Iterator[PageArray]:
        """See `PageReader`."""
        return (self._pool[page] for page in pages)


def check_readable(device: str) -> None:
    """Raises: Rejected, for pages on a device that we cannot read."""
    if device.partition(":")[0] not in {"cpu", "cuda"}:
        raise Rejected(f"KV cannot be verified: these pages are on {device}, and are read in main memory or by CUDA")


def open_reader(region: PageRegion) -> PageReader:
    """For the pages of `region`. Raises: Rejected."""
    check_readable(region.device)
    if region.device == "cpu":
        return HostPages(region)
    # torch, which a worker whose pages are in main memory may not have
    reader: PageReader = import_module("components.kv_transfer.device_pages").open_device_pages(region)
    return reader
