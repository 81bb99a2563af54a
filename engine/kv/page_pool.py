"""The pool of page ids: free pages in runs of neighbours, cached pages by block hash, and reference counts of held pages."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from components.errors import PageLeak
from engine.kv.offloaded_pages import OffloadedPages
from engine.ports import CacheEvent

SPARE: Final = 1 / 16  # at most this share of unheld pages is evicted just to get neighbouring pages
# Pages restored or evicted together in one copy, because each copy costs a call, and on several ranks a message.
COPIED_TOGETHER: Final = 64  # fewer in small pools


class FreeRuns:
    """Free pages as runs of neighbours. A NIXL write costs time per run, so block tables should have few runs."""

    def __init__(self, num_pages: int) -> None:
        self._length: dict[int, int] = {}  # first page -> length
        self._first: dict[int, int] = {}  # page after the last -> first page
        self._of_length: dict[int, dict[int, None]] = {}  # length -> first pages
        self._lengths: list[int] = []  # sorted
        self._num_free = 0
        if num_pages:
            self._put(0, num_pages)

    def __len__(self) -> int:
        return self._num_free

    @property
    def longest(self) -> int:
        return self._lengths[-1] if self._lengths else 0

    def pages(self) -> list[int]:
        return [page for first, length in sorted(self._length.items()) for page in range(first, first + length)]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free pages: first those after page `after`, then from as few runs as possible."""
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            taken += self._cut(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._cut(self._best_run(missing), missing)
        return taken

    def give(self, pages: Iterable[int]) -> None:
        first = end = -1
        for page in sorted(pages):
            if page != end:
                if end > first:
                    self._join(first, end)
                first = page
            end = page + 1
        if end > first:
            self._join(first, end)

    def _join(self, first: int, end: int) -> None:
        if first in self._first:
            first = self._first[first]
            self._pull(first)
        if end in self._length:
            end += self._pull(end)
        self._put(first, end - first)

    def _best_run(self, count: int) -> int:
        """Return the first page of the shortest run that fits, or else of the longest run."""
        at = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        alike = self._of_length[self._lengths[at]]
        first, _ = alike.popitem()  # not the first key: to find that, a dict skips all deleted ones
        alike[first] = None
        return first

    def _cut(self, first: int, count: int) -> list[int]:
        length = self._pull(first)
        if count < length:
            self._put(first + count, length - count)
        return list(range(first, first + min(count, length)))

    def _put(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length] = first
        self._num_free += length
        if length in self._of_length:
            self._of_length[length][first] = None
        else:
            self._of_length[length] = {first: None}
            insort(self._lengths, length)

    def _pull(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length]
        self._num_free -= length
        alike = self._of_length[length]
        del alike[first]
        if not alike:
            del self._of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length


class PrefixCache:
    """Maps chained block hashes to full pages, so that equal prefixes share pages. Any thread may call `match`."""

    def __init__(self, *, records_events: bool = False) -> None:
        """`records_events`: the caller fetches changes by `take_events`."""
        self.events: list[CacheEvent] = []
        self._records_events = records_events
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __contains__(self, page: object) -> bool:
        return page in self._hash_of

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        pages: list[int] = []
        for block in hashes:
            page = self._page_of.get(block)
            if page is None:
                break
            pages.append(page)
        return pages

    def match_last(self, hashes: Sequence[bytes], count: int) -> tuple[int, list[int]]:
        """Find the longest prefix of `hashes` whose last `count` blocks are cached.

        Returns: the number of blocks before these, and their pages.
        """
        end = len(hashes)
        pages: list[int] = []
        for at in range(len(hashes) - 1, -1, -1):
            page = self._page_of.get(hashes[at])
            if page is None:
                end, pages = at, []
                continue
            pages.append(page)
            if len(pages) == count:
                break
        return end - len(pages), pages[::-1]

    def page_of(self, block: bytes) -> int | None:
        return self._page_of.get(block)

    def insert(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """Add full pages. A block that is already cached keeps its page."""
        for block, page in zip(hashes, pages, strict=True):
            if block not in self._page_of and page not in self._hash_of:
                self._page_of[block] = page
                self._hash_of[page] = block
                if self._records_events:
                    self.events.append((block, True))

    def move(self, page: int, to: int) -> None:
        block = self._hash_of.pop(page)
        self._page_of[block] = to
        self._hash_of[to] = block

    def forget(self, page: int) -> bytes:
        """Remove a page. Returns: its block."""
        block = self._hash_of.pop(page)
        del self._page_of[block]
        if self._records_events:
            self.events.append((block, False))
        return block

    def take_events(self) -> list[CacheEvent]:
        taken, self.events = self.events, []
        return taken


class PagePool:
    """Every page is *free*, *cached* (not held, but in the prefix cache) or *held*.

    With `offloaded`, evicted pages are copied there, and the prefix cache refers to the copies. `hold` restores them.
    """

    def __init__(self, num_pages: int, prefix: PrefixCache, offloaded: OffloadedPages | None = None) -> None:
        self.num_pages = num_pages
        self._prefix = prefix
        self._offloaded = offloaded
        smaller = min(num_pages, 0 if offloaded is None else offloaded.room)
        self._batch = max(1, min(COPIED_TOGETHER, int(smaller * SPARE)))
        self._free = FreeRuns(num_pages)
        # oldest release first; not a dict, which would skip all deleted keys to find its first one
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._broken: set[int] = set()  # must not be published until they are allocated again

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    def num_cached_among(self, pages: Sequence[int]) -> int:
        """Count the pages that `hold` would make unavailable."""
        return sum(1 for page in pages if page in self._cached)

    def num_offloaded_among(self, pages: Sequence[int]) -> int:
        """Count the pages for which `hold` would allocate others."""
        return 0 if self._offloaded is None else sum(1 for page in pages if page >= self.num_pages)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` pages, at most `num_available`, if possible neighbours of each other and of `after`.

        If free pages are scattered, it evicts some more than needed: a full pool has hardly any neighbouring free pages.
        """
        free = self._free
        missing = count - len(free)
        self._evict(max(missing, self._batch) if missing > 0 else 0)
        most = min(count + int(self.num_available * SPARE), self.num_available)
        while count > 1 and free.longest < count and len(free) < most:
            self._evict(min(count, most - len(free)))
        pages = free.take(count, after)
        if self._broken:
            self._broken.difference_update(pages)
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, found: Sequence[int]) -> list[int]:
        """Hold pages of the prefix cache, and restore those that were offloaded.

        Returns: `found`, with offloaded pages replaced by pages of the pool.
        """
        offloaded = [page for page in found if page >= self.num_pages]
        if self._offloaded is None or not offloaded:
            self.share(found)
            return list(found)
        self.share([page for page in found if page < self.num_pages])  # first, or they could be evicted below
        self._offloaded.leave(offloaded)
        before = found.index(offloaded[0]) - 1
        last = found[before] if before >= 0 else None
        page_of: dict[int, int] = {}
        for first in range(0, len(offloaded), self._batch):  # a batch frees places for pages evicted for the next
            places = offloaded[first : first + self._batch]
            fresh = self.allocate(len(places), after=last)
            self._offloaded.restore(places, fresh)
            page_of |= zip(places, fresh, strict=True)
            last = fresh[-1]
        return [page_of.get(page, page) for page in found]

    def publish(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """Add full pages to the prefix cache. A cached block keeps its page, unless that page was offloaded."""
        if self._offloaded is not None:
            for block, page in zip(hashes, pages, strict=True):
                named = self._prefix.page_of(block)
                if named is not None and named >= self.num_pages and page not in self._prefix:
                    self._prefix.move(named, page)
                    self._offloaded.drop(named)
        self._prefix.insert(hashes, pages)

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Release pages, the last one first, so that eviction shortens prefixes from the end.

        Raises: PageLeak, for a page that is not held.
        """
        free: list[int] = []
        try:
            for page in reversed(pages):
                if self._holders[page] <= 0:
                    raise PageLeak(f"page {page} was released but no request holds it", page=page)
                self._holders[page] -= 1
                if self._holders[page]:
                    continue
                if page in self._prefix:
                    self._cached[page] = None
                else:
                    free.append(page)
        finally:
            self._free.give(free)

    def forget(self, block: bytes) -> None:
        page = self._prefix.page_of(block)
        if page is None:
            return
        self._prefix.forget(page)
        if page in self._cached:
            del self._cached[page]
            self._free.give([page])
        elif self._offloaded is not None and page >= self.num_pages:
            self._offloaded.drop(page)

    def distrust(self, pages: Sequence[int]) -> list[bytes]:
        """Unpublish held pages whose KV may be wrong. Other holders must not publish them again. Returns: their blocks."""
        self._broken.update(pages)
        return [self._prefix.forget(page) for page in pages if page in self._prefix]

    def trusts(self, pages: Sequence[int]) -> bool:
        return not self._broken or self._broken.isdisjoint(pages)

    def check(self) -> None:
        """Raises: PageLeak, unless each page is exactly one of free, cached or held."""
        free = self._free.pages()
        held = [page for page, holders in enumerate(self._holders) if holders]
        everywhere = sorted([*free, *self._cached, *held])
        if everywhere != list(range(self.num_pages)) or len(free) != self.num_free:
            raise PageLeak(
                f"{len(free)} free + {len(self._cached)} cached + {len(held)} held pages are not "
                f"each of the {self.num_pages} pages once",
                free=len(free),
                cached=len(self._cached),
                held=len(held),
                total=self.num_pages,
            )
        unnamed = [page for page in self._cached if page not in self._prefix]
        named = [page for page in free if page in self._prefix]
        if unnamed or named:
            raise PageLeak(f"cached pages without a name: {unnamed}; free pages with one: {named}")
        if self._offloaded is not None:
            self._offloaded.check(self._prefix)

    def _evict(self, count: int) -> None:
        oldest = [self._cached.popitem(last=False)[0] for _ in range(min(count, len(self._cached)))]
        if self._offloaded is not None:
            self._offloaded.keep(oldest)
        else:
            for page in oldest:
                self._prefix.forget(page)
        self._free.give(oldest)
