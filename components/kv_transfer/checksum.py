"""Checksums of pages as they lie in memory: taken by prefill over what it sends, by decode over what has landed.

CRC-32 of zlib: part of Python, lets go of the GIL, and sees every page that was exchanged, cut short or never written, and
all damage within four bytes; of other damage it misses one case in 2**32. Measured on an EPYC: 6.7 GB/s on one thread, 55 us
for a page of the default model.
"""

import asyncio
import ctypes
from collections.abc import Sequence
from zlib import crc32

from components.aio import ended
from components.errors import Rejected
from components.kv_transfer.backend import PageRegion
from components.kv_transfer.layout import KvLayout
from components.wire.instances import KvEndpoint


def check_readable(device: str) -> None:
    """Raises: Rejected, for pages that are not in main memory: checksums are computed on the CPU, and only there."""
    if device != "cpu":
        raise Rejected(
            f"KV cannot be verified: checksums are taken in main memory alone, and these pages are on {device}"
        )


def check_verifiable(ours: KvLayout, peer: KvEndpoint) -> None:
    """Raises: Rejected, when what `peer` sends us cannot be compared page by page."""
    check_readable(peer.device)
    if peer.layout.page_size != ours.page_size:
        sizes = f"{ours.page_size} here, {peer.layout.page_size} there"
        raise Rejected(f"KV cannot be verified: pages have different sizes ({sizes})")


class PageChecksums:
    """Of the pages of one pool, which must outlive it. Raises: Rejected, for a pool that is not in main memory."""

    def __init__(self, region: PageRegion) -> None:
        check_readable(region.device)
        self._page_bytes = region.layout.page_bytes
        pool = (ctypes.c_ubyte * (region.num_pages * self._page_bytes)).from_address(region.address)
        self._pool = memoryview(pool).cast("B")

    async def of(self, pages: Sequence[int]) -> list[int]:
        """One uint32 a page, computed on another thread; cancelled, it still returns only when nothing reads the pool."""
        work = asyncio.ensure_future(asyncio.to_thread(self._of, list(pages)))
        try:
            return await asyncio.shield(work)
        finally:
            await ended(work)

    def _of(self, pages: Sequence[int]) -> list[int]:
        size = self._page_bytes
        return [crc32(self._pool[page * size : (page + 1) * size]) for page in pages]
