"""Checksums of KV: taken by prefill over what it sends, by decode over what has landed.

Both must sum the same bytes in the same order, whatever size their pages have. So one checksum stands for the tokens of a
page of the larger size, as far as they were sent, taken page after page of the smaller size: what is sent in one write never
ends within such a page. Within it the order is that of memory: stripe after stripe. With equal sizes, that is the page.

CRC-32 of zlib: part of Python, lets go of the GIL, and sees every page that was exchanged, cut short or never written, and
all damage within four bytes; of other damage it misses one case in 2**32. Measured on an EPYC: 6.9 GB/s on one thread, 53 us
for a page of the default model.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from zlib import crc32

import numpy as np

from components.aio import ended
from components.kv_transfer.backend import PageRegion
from components.kv_transfer.page_reader import PageArray, PageReader, open_reader


@dataclass(frozen=True, slots=True)
class Sent:
    """What prefill sends of one prompt, as decode sees it."""

    pages: Sequence[int]  # decode's block table
    tokens: range
    page_size: int  # prefill's


class PageChecksums:
    """Of one pool, which must outlive it. Raises: Rejected, for a pool that cannot be read."""

    def __init__(self, region: PageRegion) -> None:
        self._reader = open_reader(region)
        self._page_size = region.layout.page_size

    def of_transfer(self, peer_page_size: int) -> "TransferChecksums":
        """To begin with, of nothing."""
        return TransferChecksums(self._reader, self._page_size, peer_page_size)


class TransferChecksums:
    """Of one prompt's KV, whose tokens are added in order, in one part or several."""

    def __init__(self, reader: PageReader, page_size: int, peer_page_size: int) -> None:
        self.sums: list[int] = []  # uint32, one for each page of the larger size
        self._reader = reader
        self._page_size = page_size
        self._small, self._large = sorted((page_size, peer_page_size))
        self._page = -1  # of the larger size, counted from the prompt's first; that the last sum is of

    def num_sums(self, tokens: range) -> int:
        """How many checksums these tokens have."""
        return len(self._pages_of(tokens, self._large))

    def num_pages(self, tokens: range) -> int:
        """Pages of ours that hold any of them."""
        return len(self._pages_of(tokens, self._page_size))

    def covered(self, index: int, tokens: range) -> range:
        """Entries of our block table that checksum `index` of these tokens is about."""
        first = (tokens.start // self._large + index) * self._large
        part = range(max(first, tokens.start), min(first + self._large, tokens.stop))
        return self._pages_of(part, self._page_size)

    async def add(self, pages: Sequence[int], tokens: range) -> None:
        """Continue with `tokens`, whose KV stands in block table `pages`; they follow those that were added before.

        Works on another thread; cancelled, it still returns only when nothing reads the pool.
        """
        if self._small == self._large:  # whole pages move, with rows that no token fills
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
        """`rows` of a page whose row 0 is token `first`."""
        for start in range(rows.start, rows.stop, self._small):
            if (first + start) // self._large != self._page:
                self._page = (first + start) // self._large
                self.sums.append(0)
            part = np.ascontiguousarray(page[:, start : min(start + self._small, rows.stop)])
            self.sums[-1] = crc32(part.data, self.sums[-1])

    @staticmethod
    def _pages_of(tokens: range, page_size: int) -> range:
        return range(tokens.start // page_size, -(-tokens.stop // page_size)) if tokens else range(0)
