"""The mock's pages: real host memory that NIXL moves, and in each page a mark of the tokens whose KV it stands for.

The mark is a checksum over all tokens up to the last one in the page, so it can be carried on from any page, by whoever
has the page. It stands at both ends of the page: a page that arrived in part is noticed.
"""

import ctypes
import mmap
from collections.abc import Sequence
from struct import Struct
from typing import Final
from zlib import crc32

from components.kv_transfer.layout import KvLayout
from components.wire.tokens import pack_tokens
from engine.inflight import StepFailed
from engine.ports import KvRegion

MARK: Final = Struct("<II")  # tokens of this page whose KV stands, checksum of all tokens up to the last of them


class MarkedPages:
    """A pool of `num_pages` pages. Memory is taken by the kernel page by page, as it is first written."""

    def __init__(self, layout: KvLayout, num_pages: int) -> None:
        self._page_size = layout.page_size
        self._page_bytes = layout.page_bytes
        self._memory = mmap.mmap(-1, num_pages * layout.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.region = KvRegion(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), num_pages, layout, "cpu")

    def compute(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int, origin: int = 0) -> int:
        """Write the marks of tokens `start` to `end`; the checksum of all tokens before `end`.

        `origin` is the checksum of no tokens, another one for each adapter.
        Raises: StepFailed, when the pages do not hold what was computed before `start`.
        """
        checksum = self._read(pages, tokens, start, origin) if start else origin
        while start < end:
            index, offset = divmod(start, self._page_size)
            stop = min(end, start + self._page_size - offset)
            checksum = crc32(pack_tokens(tokens[start:stop]), checksum)
            head = pages[index] * self._page_bytes
            MARK.pack_into(self._memory, head, stop - index * self._page_size, checksum)
            MARK.pack_into(self._memory, head + self._page_bytes - MARK.size, stop - index * self._page_size, checksum)
            start = stop
        return checksum

    def copy(self, source: int, target: int) -> None:
        """Give page `target` the marks of page `source`."""
        for offset in (0, self._page_bytes - MARK.size):
            mark = MARK.unpack_from(self._memory, source * self._page_bytes + offset)
            MARK.pack_into(self._memory, target * self._page_bytes + offset, *mark)

    def _read(self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int, origin: int) -> int:
        index = (num_tokens - 1) // self._page_size
        head = pages[index] * self._page_bytes
        first = MARK.unpack_from(self._memory, head)
        last = MARK.unpack_from(self._memory, head + self._page_bytes - MARK.size)
        count, checksum = first
        wanted = num_tokens - index * self._page_size
        if first == last and count == wanted + 1:  # a branch computes its prompt's last token again
            before = self._read(pages, tokens, num_tokens - wanted, origin) if index else origin
            shorter = crc32(pack_tokens(tokens[num_tokens - wanted : num_tokens]), before)
            if crc32(pack_tokens(tokens[num_tokens : num_tokens + 1]), shorter) == checksum:
                return shorter
        if first != last or count != wanted:
            raise StepFailed(f"page {pages[index]} should hold {wanted} tokens, but its marks are {first} and {last}")
        return int(checksum)
