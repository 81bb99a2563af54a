"""Checksums of KV, over sent pages by prefill and received pages by decode.

A checksum covers a page of the larger size, in parts of the smaller size, so both sides sum the same bytes.
zlib's CRC-32 releases the GIL (docs/decisions/015-kv-checksum.md).
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from zlib import crc32

import numpy as np

from components.aio import ended
from components.errors import Rejected
from components.kv_transfer.backend import PageRegion
from components.kv_transfer.page_reader import PageArray, PageReader, open_reader
from components.wire.layout import KvLayout


def check_whole(layout: KvLayout) -> None:
    """Raises: Rejected."""
    if layout.shards > 1:
        raise Rejected(
            f"KV cannot be verified: these pages are on {layout.shards} devices, and checksums are of whole pages"
        )


class PageChecksums:
    """Reads one pool, which must outlive it. Raises: Rejected, if it cannot be read."""

    def __init__(self, region: PageRegion) -> None:
        check_whole(region.layout)
        self._reader = open_reader(region)
        self._page_size = region.layout.page_size

    def of_transfer(self, peer_page_size: int) -> "TransferChecksums":
        return TransferChecksums(self._reader, self._page_size, peer_page_size)


class TransferChecksums:
    def __init__(self, reader: PageReader, page_size: int, peer_page_size: int) -> None:
        self.sums: list[int] = []  # uint32, one per page of the larger size
        self._reader = reader
        self._page_size = page_size
        self._small, self._large = sorted((page_size, peer_page_size))
        self._page = -1  # the last sum's page, of the larger size

    def num_sums(self, tokens: range) -> int:
        return len(self._pages_of(tokens, self._large))

    def num_pages(self, tokens: range) -> int:
        return len(self._pages_of(tokens, self._page_size))

    def covered(self, index: int, tokens: range) -> range:
        """Entries of our block table that checksum `index` covers."""
        first = (tokens.start // self._large + index) * self._large
        part = range(max(first, tokens.start), min(first + self._large, tokens.stop))
        return self._pages_of(part, self._page_size)

    async def add(self, pages: Sequence[int], tokens: range) -> None:
        """Add `tokens`, which follow the earlier ones, on another thread. A cancelled call waits for it."""
        if self._small == self._large:  # whole pages move, including rows without a token
            tokens = range(tokens.start, -(-tokens.stop // self._large) * self._large)
        work = asyncio.ensure_future(asyncio.to_thread(self._add, list(pages), tokens))
        try:
            await asyncio.shield(work)
        finally:
            await ended(work)

    def _add(self, pages: Sequence[int], tokens: range) -> None:
        needed = self._pages_of(tokens, self._page_size)
        read = self._reader.read(pages[needed.start : needed.stop])
        for first, page in zip(count(needed.start * self._page_size, self._page_size), read, strict=False):
            self._add_page(page, range(max(tokens.start - first, 0), min(tokens.stop - first, self._page_size)), first)

    def _add_page(self, page: PageArray, rows: range, first: int) -> None:
        """Row 0 of `page` is token `first`."""
        for start in range(rows.start, rows.stop, self._small):
            if (first + start) // self._large != self._page:
                self._page = (first + start) // self._large
                self.sums.append(0)
            part = np.ascontiguousarray(page[:, start : min(start + self._small, rows.stop)])
            self.sums[-1] = crc32(part.data, self.sums[-1])

    @staticmethod
    def _pages_of(tokens: range, page_size: int) -> range:
        return range(tokens.start // page_size, -(-tokens.stop // page_size)) if tokens else range(0)
