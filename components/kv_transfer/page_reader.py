"""Read pages of a pool on any device."""

import ctypes
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.errors import Rejected
from components.wire.layout import KvRegion

PageArray = NDArray[np.uint8]  # [stripes, page_size, row_bytes]


class PageReader(Protocol):
    """Reads pages of a pool, which must outlive it, from any thread."""

    def read(self, pages: Sequence[int]) -> Iterator[PageArray]:
        """Yield pages, each valid until the next; it may be the pool itself."""


class HostPages:
    def __init__(self, region: KvRegion) -> None:
        layout = region.layout
        pool = (ctypes.c_ubyte * (region.num_pages * layout.page_bytes)).from_address(region.address)
        shape = (region.num_pages, layout.num_stripes, layout.page_size, layout.row_bytes)
        self._pool = np.frombuffer(memoryview(pool).cast("B"), dtype=np.uint8).reshape(shape)

    def read(self, pages: Sequence[int]) -> Iterator[PageArray]:
        return (self._pool[page] for page in pages)


def check_readable(device: str) -> None:
    if device.partition(":")[0] not in {"cpu", "cuda"}:
        raise Rejected(f"KV cannot be verified: these pages are on {device}, and are read in main memory or by CUDA")


def open_reader(region: KvRegion) -> PageReader:
    check_readable(region.device)
    if region.device == "cpu":
        return HostPages(region)
    # needs torch, which a CPU worker may lack
    reader: PageReader = import_module("components.kv_transfer.device_pages").open_device_pages(region)
    return reader
