"""Memory for pages that the pool evicts: main memory or a file; and copies of whole pages, also within the pool."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import torch

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.cpu.machine_memory import check_fits, check_fits_in
from engine.device.huge_pages import HugeMemory
from engine.kv.storage import TORCH_DTYPES

ON_DISK: Final = "settings engine.kv_offload_gb and engine.kv_offload_dir: evicted KV pages"


def allocate_offloaded(layout: KvLayout, num_pages: int, device: torch.device, directory: Path | None) -> torch.Tensor:
    """Allocate main memory, or a mapped file in `directory`.

    Returns: [num_pages, kv_heads, layers, 2, page_size, head_dim], in memory that copies from `device` need not wait for.
    Raises: WrongSettings, if there is not enough.
    """
    shape = (num_pages, layout.num_heads, layout.layers, 2, layout.page_size, layout.head_dim)
    num_bytes = num_pages * layout.page_bytes
    dtype = TORCH_DTYPES[layout.dtype]
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    if directory is not None:
        return torch.frombuffer(_file(directory, num_bytes), dtype=dtype).view(shape)
    check_fits(num_bytes, "setting engine.kv_offload_gb: evicted KV pages")
    pages = HugeMemory().take(shape, dtype)
    if device.type == "cuda":
        _pin(pages)
    return pages


def _file(directory: Path, num_bytes: int) -> mmap.mmap:
    """Map a file without a name, so that its space is freed however the process ends.

    All of its space is allocated now, because a write into a mapped file on a full disk would end the process.
    """
    check_fits_in(directory, num_bytes, ON_DISK)
    try:
        with tempfile.TemporaryFile(dir=directory.expanduser()) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as exc:
        raise WrongSettings(
            f"{ON_DISK}: cannot allocate {num_bytes / 1e9:.1f} GB in {directory}: {exc.strerror or exc}"
        ) from exc


def _pin(memory: torch.Tensor) -> None:
    """Register memory with CUDA until the tensor is freed. torch's own pinned memory is rounded up to a power of two."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # as torch ships it
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise WrongSettings(
            f"setting engine.kv_offload_gb: CUDA cannot lock {memory.nbytes / 1e9:.1f} GB of main memory ({error}); lower it"
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False


class PageCopies:
    """Copies pages by id: first come the ids of the pool, then those of offloaded pages.

    On a device, copies have their own stream: they run beside the step in flight, which uses none of their pages.
    """

    def __init__(self, storage: torch.Tensor, offloaded: torch.Tensor) -> None:
        self._storage = storage
        self._offloaded = offloaded
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
        in_pool = len(self._storage)
        return self._storage[page] if page < in_pool else self._offloaded[page - in_pool]
