"""Main memory for pages outside the pool: evicted ones, and those on their way to or from files; and copies of pages."""

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from components.startup import WrongSettings
from components.wire.layout import KvLayout, of_whole
from engine.cpu.machine_memory import check_fits
from engine.device.huge_pages import HugeMemory
from engine.kv.storage import TORCH_DTYPES


def allocate_offloaded(layout: KvLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """Allocate main memory that copies from `device` need not wait for.

    Returns: [num_pages, kv_heads, layers, 2, page_size, head_dim].
    Raises: WrongSettings, if there is not enough.
    """
    check_fits(num_pages * layout.page_bytes, "setting engine.kv_offload_gb: evicted KV pages")
    pages = HugeMemory().take(_shape(layout, num_pages), TORCH_DTYPES[layout.dtype])
    if device.type == "cuda" and num_pages:
        _pin(pages, "kv_offload_gb")
    return pages


def allocate_staging(layout: KvLayout, num_pages: int, device: torch.device, shared: int | None) -> torch.Tensor:
    """Allocate memory for pages between the pool and files.

    Args:
        shared: descriptor of memory that all ranks map; None: there is one rank.

    Returns: [num_pages, kv_heads of all ranks, layers, 2, page_size, head_dim].
    """
    whole = of_whole(layout)
    if shared is None or not num_pages:
        pages = HugeMemory().take(_shape(whole, num_pages), TORCH_DTYPES[layout.dtype])
    else:
        num_bytes = num_pages * whole.page_bytes
        os.ftruncate(shared, max(num_bytes, os.fstat(shared).st_size))
        mapped = torch.frombuffer(mmap.mmap(shared, num_bytes), dtype=TORCH_DTYPES[layout.dtype])
        pages = mapped.view(_shape(whole, num_pages))
    if device.type == "cuda" and num_pages:
        _pin(pages, "kv_store_dir")
    return pages


def byte_views(pages: torch.Tensor) -> list[memoryview]:
    """Return the bytes of each page."""
    return [memoryview(page) for page in pages.view(torch.uint8).flatten(1).numpy()]


def _shape(layout: KvLayout, num_pages: int) -> tuple[int, ...]:
    return (num_pages, layout.num_heads, layout.layers, 2, layout.page_size, layout.head_dim)


def _pin(memory: torch.Tensor, setting: str) -> None:
    """Register memory with CUDA until the tensor is freed. torch's own pinned memory is rounded up to a power of two."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # as torch ships it
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise WrongSettings(
            f"setting engine.{setting}: CUDA cannot lock {memory.nbytes / 1e9:.1f} GB of main memory ({error}); lower it"
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False


class PageCopies:
    """Copies pages by id: first come the ids of the pool, then those of each other memory.

    On a device, copies have their own stream: they run beside the step in flight, which uses none of their pages.
    """

    def __init__(self, storage: torch.Tensor, *others: torch.Tensor) -> None:
        self._memories = (storage, *others)
        self._stream: torch.cuda.Stream | None = None
        if storage.device.type == "cuda":
            self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]  # as torch ships it

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages, which no other stream uses. Return after all: a peer may then write to them."""
        on_stream: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            on_stream = torch.cuda.stream(self._stream)
        with on_stream:
            for source, target in moves:
                self._page(target).copy_(self._page(source), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _page(self, page: int) -> torch.Tensor:
        for memory in self._memories:
            if page < len(memory):
                return memory[page]
            page -= len(memory)
        raise IndexError(f"there is no page {page} beyond the last")
