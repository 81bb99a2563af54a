"""The mock engine's pages: host memory with a mark in each block of tokens, for each KV head.

A mark contains the head's number, and a checksum over all tokens up to the block's last, so any worker can continue the
page. Marks are in the first and last stripe of each head of each rank, and so detect a page that arrived in part or is
another rank's. They are in the row of the block's first token, so that they survive a copy into pages of another size.

A token that is computed alone renews only the first and last mark of its block, unless it fills the block. The marks
between keep the earlier number of tokens with KV, and the first and last mark have that number in a second field.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from struct import Struct
from typing import Final
from zlib import crc32

from components.startup import WrongSettings
from components.wire.layout import KvLayout, KvRegion, RankMemory, largest_shard, of_shard, of_whole
from components.wire.tokens import pack_tokens
from engine.config import PAGE_SIZES
from engine.runner.step_runner import StepFailed
from engine.scheduler.request import MIN_COMPUTED_TOKENS

# A mark is a uint64: the block's tokens with KV; how many of them all marks include; KV head; checksum up to the last.
MARK: Final = Struct("<BBHI")
ALL, HEAD, CHECKSUM = 8, 16, 32  # bit offsets
BYTE: Final = 0xFF
HEADER: Final = (1 << CHECKSUM) - 1
MARKS: Final = 2  # version of the marks; workers with different versions do not exchange pages
TOKEN: Final = Struct("<i")  # as in `pack_tokens`
BLOCK: Final = min(PAGE_SIZES)  # tokens

Mark = tuple[int, int, int, int]


class MarkedPages:
    """The pools of all ranks. The kernel allocates memory when it is first written.

    Args:
        layout: layout of the first rank.
        num_others: pages after those of the pool, which peers cannot access.
        num_slots: pages with the heads of all ranks; their ids come last.
        shared: whether followers' processes map their pools, by `descriptor`. The leader writes the marks of all ranks.
    Raises: WrongSettings, if there is not enough memory.
    """

    def __init__(
        self, layout: KvLayout, num_pages: int, num_others: int = 0, num_slots: int = 0, *, shared: bool = False
    ) -> None:
        ranks = [of_shard(layout, rank, layout.shards) for rank in range(layout.shards)]
        pool_bytes = rank_bytes(layout, num_pages + num_others)
        num_bytes = pool_bytes * len(ranks)
        slot_bytes = of_whole(layout).page_bytes
        try:
            self.descriptor, memory = _allocate(num_bytes, shared=shared)
            _, slots = _allocate(max(1, num_slots * slot_bytes), shared=False)
        except (OSError, OverflowError) as exc:
            raise WrongSettings(
                "settings engine.kv_memory_gb, engine.num_pages and engine.kv_offload_gb: no memory for KV pages of "
                f"{num_bytes / 1e9:.1f} GB"
            ) from exc
        self._block_marks = BLOCK * layout.row_bytes // MARK.size
        self._blocks = layout.page_size // BLOCK
        stripe_bytes = layout.page_size * layout.row_bytes
        head_bytes = stripe_bytes * layout.layers * 2
        # for each mark of a block: words per page, its offset in page 0, and the bits of its head
        self._places = [
            (
                of_rank.page_bytes // MARK.size,
                (rank * pool_bytes + i * head_bytes + place) // MARK.size,
                head << HEAD,
            )
            for rank, of_rank in enumerate(ranks)
            for i, head in enumerate(of_rank.heads)
            for place in (0, head_bytes - stripe_bytes)
        ]
        # for the same marks: offset in slot 0, where several ranks may have the same head
        self._slot_offsets = [
            (head * head_bytes + place) // MARK.size
            for of_rank in ranks
            for head in of_rank.heads
            for place in (0, head_bytes - stripe_bytes)
        ]
        self._inner = self._places[1:-1]
        self._first_words = self._places[0][0]
        self._last_words, self._last_offset, self._last_head = self._places[-1]
        self._words = memoryview(memory)[: num_bytes // MARK.size * MARK.size].cast("Q")
        self.slots = [memoryview(slots)[slot * slot_bytes : (slot + 1) * slot_bytes] for slot in range(num_slots)]
        self._first_slot = num_pages + num_others
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pool_bytes = pool_bytes
        self._num_pages = num_pages
        self._layout = layout

    def region(self, followers: Sequence[RankMemory] | None = None) -> KvRegion:
        """Return the region of the pools. `followers`: their reports; None: all ranks are in this process."""
        if followers is None:
            addresses = (self._address + rank * self._pool_bytes for rank in range(1, self._layout.shards))
            followers = [RankMemory(os.getpid(), "cpu", address, "") for address in addresses]
        return KvRegion(self._address, self._num_pages, self._layout, "cpu", followers)

    def extend(self, pages: Sequence[int], token_id: int, at: int) -> int | None:
        """Write the mark of the token at `at`.

        Returns: the checksum up to it. None if earlier marks are missing or different; nothing is then written, and
        the caller must use `compute`.
        """
        offset = at % BLOCK
        if not offset:
            return None
        page, skipped = self._place(pages, at // BLOCK)
        first = page * self._first_words + skipped
        last, words = page * self._last_words + skipped + self._last_offset, self._words
        mark = words[first]
        if mark & BYTE != offset or words[last] != mark + self._last_head:
            return None
        if mark >> ALL & BYTE == offset and not self._agree(page, skipped, mark):
            return None
        checksum = crc32(TOKEN.pack(token_id), mark >> CHECKSUM)
        if offset + 1 == BLOCK:
            self._mark_all(page, skipped, BLOCK, checksum)
        else:
            mark = (mark & HEADER) + 1 | checksum << CHECKSUM
            words[first] = mark
            words[last] = mark + self._last_head
        return checksum

    def compute(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int, origin: int = 0) -> int:
        """Write the marks of tokens `start` to `end`.

        Args:
            origin: the initial checksum, which depends on the adapter.
        Returns: the checksum before `end`.
        Raises: StepFailed, if the pages do not contain the tokens before `start`.
        """
        checksum = self._read(pages, tokens, start, origin) if start else origin
        while start < end:
            block, offset = divmod(start, BLOCK)
            stop = min(end, start + BLOCK - offset)
            checksum = crc32(pack_tokens(tokens[start:stop]), checksum)
            self._mark_all(*self._place(pages, block), stop - block * BLOCK, checksum)
            start = stop
        return checksum

    def copy(self, source: int, target: int) -> None:
        from_words, sources = self._marks_of(source)
        to_words, targets = self._marks_of(target)
        for block in range(self._blocks):
            skipped = block * self._block_marks
            for at, to in zip(sources, targets, strict=True):
                to_words[to + skipped] = from_words[at + skipped]

    def marks(self, page: int, block: int) -> list[Mark]:
        """Return the marks of a block of `page`: two for each rank and head."""
        skipped = block * self._block_marks
        found = (self._words[page * size + skipped + offset] for size, offset, _ in self._places)
        return [(mark & BYTE, mark >> ALL & BYTE, (mark & HEADER) >> HEAD, mark >> CHECKSUM) for mark in found]

    def _marks_of(self, page: int) -> tuple[memoryview, list[int]]:
        """Return the words of the page's memory, and the indices of its first block's marks."""
        if page < self._first_slot:
            return self._words, [page * size + offset for size, offset, _ in self._places]
        return self.slots[page - self._first_slot].cast("Q"), self._slot_offsets

    def _place(self, pages: Sequence[int], block: int) -> tuple[int, int]:
        """Return the block's page, and the number of words before the block in each stripe."""
        index, number = divmod(block, self._blocks)
        return pages[index], number * self._block_marks

    def _mark_all(self, page: int, skipped: int, count: int, checksum: int) -> None:
        mark, words = count | count << ALL | checksum << CHECKSUM, self._words
        for size, offset, head in self._places:
            words[page * size + skipped + offset] = mark + head

    def _agree(self, page: int, skipped: int, mark: int) -> bool:
        """Return whether the marks between the first and the last one are `mark`, with their heads."""
        words = self._words
        return all(words[page * size + skipped + offset] == mark + head for size, offset, head in self._inner)

    def _read(self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int, origin: int) -> int:
        """Return the checksum of `num_tokens`. The pages may contain more, but no more than a branch computes again."""
        block = (num_tokens - 1) // BLOCK
        wanted = num_tokens - block * BLOCK
        page, skipped = self._place(pages, block)
        first, last = page * self._first_words + skipped, page * self._last_words + skipped + self._last_offset
        mark = self._words[first]
        count, of_all, checksum = mark & BYTE, mark >> ALL & BYTE, mark >> CHECKSUM
        is_right = self._words[last] == mark + self._last_head
        if is_right and of_all == count == wanted and self._agree(page, skipped, mark):
            return checksum
        if is_right and 0 < of_all <= count and wanted <= count <= wanted + MIN_COMPUTED_TOKENS:
            start = num_tokens - wanted
            before = self._read(pages, tokens, start, origin) if block else origin

            def checksum_of(length: int) -> int:
                return crc32(pack_tokens(tokens[start : start + length]), before)

            inner_mark = of_all | of_all << ALL | checksum_of(of_all) << CHECKSUM
            if checksum_of(count) == checksum and self._agree(page, skipped, inner_mark):
                return checksum_of(wanted)
        found = dict.fromkeys(self.marks(page, block % self._blocks))
        raise StepFailed(
            f"a block of page {page} should contain {wanted} tokens, but its marks are {', '.join(map(str, found))}"
        )


def rank_bytes(layout: KvLayout, num_pages: int) -> int:
    """Return the size of the largest rank's pool, rounded up to pages of the machine's memory."""
    return -(-num_pages * largest_shard(layout).page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _allocate(num_bytes: int, *, shared: bool) -> tuple[int | None, mmap.mmap]:
    """Allocate memory; shared memory has a descriptor. Raises: OSError, OverflowError."""
    if not shared:
        return None, mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    descriptor = os.memfd_create("kvmesh-pages")
    try:
        os.ftruncate(descriptor, num_bytes)
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
