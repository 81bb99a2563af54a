"""Checksums of the pages that prefill sent and decode received.

A checksum covers a page of the larger size, in parts of the smaller size, so both sides sum the same bytes. zlib's CRC-32
releases the GIL (docs/decisions/015-kv-checksum.md).
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Protocol
from zlib import crc32

import numpy as np

from components.aio import ended
from components.kv_transfer.page_reader import PageArray, PageReader, open_reader
from components.kv_transfer.rank_connection import RankConnection, Sum
from components.wire.layout import KvLayout, KvRegion, of_shard


class Checksums(Protocol):
    def num_sums(self, tokens: range) -> int: ...

    def num_pages(self, tokens: range) -> int: ...

    def covered(self, index: int, tokens: range) -> range:
        """Entries of our block table that checksum `index` covers."""

    async def add(self, pages: Sequence[int], tokens: range) -> None:
        """Add `tokens`, which follow the earlier ones, on another thread. A cancelled call waits for it."""

    async def total(self) -> list[int]:
        """uint32, one per page of the larger size."""


class PageChecksums:
    """Checksums of the pages of one pool, which must outlive it. Raises: Rejected, if it cannot be read.

    Args:
        connections: to the followers, which sum their own pages.
    """

    def __init__(self, region: KvRegion, connections: Sequence[RankConnection] = ()) -> None:
        self._reader = open_reader(region)
        self._layout = region.layout
        self._connections = connections

    def of_transfer(self, peer_page_size: int, peer_shards: int = 1, *, every_copy: bool = False) -> Checksums:
        """`every_copy`: also compare the copies of heads that several ranks hold."""
        layout = self._layout
        if layout.shards == peer_shards == 1:
            return TransferChecksums(self._reader, layout.page_size, peer_page_size)
        own = TransferChecksums(self._reader, layout.page_size, peer_page_size, head_groups(layout))
        return RankedChecksums(own, layout, peer_page_size, self._connections, every_copy=every_copy)


def head_groups(layout: KvLayout) -> list[slice]:
    per_head = layout.layers * 2
    return [slice(i * per_head, (i + 1) * per_head) for i in range(layout.num_heads)]


class RankedChecksums:
    """Checksums between instances of several ranks.

    A page's checksum combines those of its heads, so it does not depend on which rank holds a head. Followers sum at the end of
    the transfer, concurrently.
    """

    def __init__(
        self,
        own: "TransferChecksums",
        layout: KvLayout,
        peer_page_size: int,
        connections: Sequence[RankConnection],
        *,
        every_copy: bool,
    ) -> None:
        self.num_sums, self.num_pages, self.covered = own.num_sums, own.num_pages, own.covered
        self._own = own
        self._layout = layout
        self._peer_page_size = peer_page_size
        self._connections = connections
        self._every_copy = every_copy
        self._pages: Sequence[int] = ()
        self._tokens = range(0)

    async def add(self, pages: Sequence[int], tokens: range) -> None:
        await self._own.add(pages, tokens)
        self._pages = list(pages)
        self._tokens = range(self._tokens.start if self._tokens else tokens.start, tokens.stop)

    async def total(self) -> list[int]:
        order = Sum(list(self._pages), (self._tokens.start, self._tokens.stop), self._peer_page_size)
        answers = await asyncio.gather(*(connection.ask(order) for connection in self._connections))
        ranks = [self._own.groups, *(answer.sums for answer in answers)]
        return [self._joined([rank[page] for rank in ranks]) for page in range(len(self._own.groups))]

    def _joined(self, ranks: Sequence[Sequence[int]]) -> int:
        heads: dict[int, int] = {}
        damaged = False
        for rank, sums in enumerate(ranks):
            for head, found in zip(of_shard(self._layout, rank, self._layout.shards).heads, sums, strict=True):
                damaged |= self._every_copy and heads.get(head, found) != found
                heads.setdefault(head, found)
        joined = crc32(np.array([heads[head] for head in sorted(heads)], dtype="<u4").tobytes())
        return joined ^ damaged


class TransferChecksums:
    """The checksums of one rank; `groups` of stripes are summed separately."""

    def __init__(
        self, reader: PageReader, page_size: int, peer_page_size: int, groups: Sequence[slice] = (slice(None),)
    ) -> None:
        self.groups: list[list[int]] = []  # uint32, by page of the larger size, then by group
        self._slices = groups
        self._reader = reader
        self._page_size = page_size
        self._small, self._large = sorted((page_size, peer_page_size))
        self._page = -1  # page of the last sum, of the larger size

    async def total(self) -> list[int]:
        return [page[0] for page in self.groups]

    def num_sums(self, tokens: range) -> int:
        return len(self._pages_of(tokens, self._large))

    def num_pages(self, tokens: range) -> int:
        return len(self._pages_of(tokens, self._page_size))

    def covered(self, index: int, tokens: range) -> range:
        first = (tokens.start // self._large + index) * self._large
        part = range(max(first, tokens.start), min(first + self._large, tokens.stop))
        return self._pages_of(part, self._page_size)

    async def add(self, pages: Sequence[int], tokens: range) -> None:
        if self._small == self._large:  # whole pages move, with rows without a token
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
        """Row 0 of the page is token `first`."""
        for start in range(rows.start, rows.stop, self._small):
            if (first + start) // self._large != self._page:
                self._page = (first + start) // self._large
                self.groups.append([0] * len(self._slices))
            sums = self.groups[-1]
            for i, stripes in enumerate(self._slices):
                part = np.ascontiguousarray(page[stripes, start : min(start + self._small, rows.stop)])
                sums[i] = crc32(part.data, sums[i])

    @staticmethod
    def _pages_of(tokens: range, page_size: int) -> range:
        return range(tokens.start // page_size, -(-tokens.stop // page_size)) if tokens else range(0)
