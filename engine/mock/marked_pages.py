"""The mock's pages: host memory with a mark in each block of tokens.

A mark is a checksum over all tokens up to the block's last, so any worker can continue the page.
Marks in the first and the last stripe detect a page that arrived in part.
In the row of the block's first token, a mark survives a move into pages of another size.
"""

import ctypes
import mmap
from collections.abc import Sequence
from struct import Struct
from typing import Final
from zlib import crc32

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from components.wire.tokens import pack_tokens
from engine.config import PAGE_SIZES
from engine.ports import KvRegion
from engine.runner.step_runner import StepFailed
from engine.scheduler.request import LEAST_COMPUTED

MARK: Final = Struct("<II")  # tokens of the block with KV, checksum up to the last of them
TOKEN: Final = Struct("<i")  # as in `pack_tokens`
BLOCK: Final = min(PAGE_SIZES)  # tokens


class MarkedPages:
    """The kernel commits memory as it is first written.

    Raises: WrongSettings, if there is not enough.
    """

    def __init__(self, layout: KvLayout, num_pages: int) -> None:
        self._page_bytes = layout.page_bytes
        self._block_bytes = BLOCK * layout.row_bytes
        self._blocks = layout.page_size // BLOCK
        self._last_stripe = (layout.num_stripes - 1) * layout.page_size * layout.row_bytes
        num_bytes = num_pages * layout.page_bytes
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as exc:
            raise WrongSettings(
                f"settings engine.kv_memory_gb and engine.num_pages: no memory for KV pages of {num_bytes / 1e9:.1f} GB"
            ) from exc
        self.region = KvRegion(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), num_pages, layout, "cpu")

    def extend(self, pages: Sequence[int], token_id: int, at: int) -> int | None:
        """Write the mark of the token at `at`.

        Returns: the checksum up to it; None, with nothing written, if earlier marks are missing or different: then
        call `compute`.
        """
        offset = at % BLOCK
        if not offset:
            return None
        first, last = self._places(pages, at // BLOCK)
        memory = self._memory
        mark = MARK.unpack_from(memory, first)
        count, checksum = mark
        if count != offset or mark != MARK.unpack_from(memory, last):
            return None
        checksum = crc32(TOKEN.pack(token_id), checksum)
        MARK.pack_into(memory, first, offset + 1, checksum)
        MARK.pack_into(memory, last, offset + 1, checksum)
        return checksum

    def compute(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int, origin: int = 0) -> int:
        """Write the marks of tokens `start` to `end`.

        Args:
            origin: the checksum of no tokens, one for each adapter.
        Returns: the checksum before `end`.
        Raises: StepFailed, if the pages do not hold what was computed before `start`.
        """
        checksum = self._read(pages, tokens, start, origin) if start else origin
        while start < end:
            block, offset = divmod(start, BLOCK)
            stop = min(end, start + BLOCK - offset)
            checksum = crc32(pack_tokens(tokens[start:stop]), checksum)
            for place in self._places(pages, block):
                MARK.pack_into(self._memory, place, stop - block * BLOCK, checksum)
            start = stop
        return checksum

    def copy(self, source: int, target: int) -> None:
        for block in range(self._blocks):
            for here, there in zip(self._places([source], block), self._places([target], block), strict=True):
                MARK.pack_into(self._memory, there, *MARK.unpack_from(self._memory, here))

    def _places(self, pages: Sequence[int], block: int) -> tuple[int, int]:
        index, inner = divmod(block, self._blocks)
        first = pages[index] * self._page_bytes + inner * self._block_bytes
        return first, first + self._last_stripe

    def _read(self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int, origin: int) -> int:
        block = (num_tokens - 1) // BLOCK
        place, other = self._places(pages, block)
        first, last = MARK.unpack_from(self._memory, place), MARK.unpack_from(self._memory, other)
        count, checksum = first
        wanted = num_tokens - block * BLOCK
        # a branch computes its prompt's last tokens again
        if first == last and wanted < count <= wanted + LEAST_COMPUTED:
            before = self._read(pages, tokens, num_tokens - wanted, origin) if block else origin
            shorter = crc32(pack_tokens(tokens[num_tokens - wanted : num_tokens]), before)
            if crc32(pack_tokens(tokens[num_tokens : num_tokens + count - wanted]), shorter) == checksum:
                return shorter
        if first != last or count != wanted:
            page = pages[block // self._blocks]
            raise StepFailed(
                f"a block of page {page} should hold {wanted} tokens, but its marks are {first} and {last}"
            )
        return int(checksum)
