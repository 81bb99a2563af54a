"""The pool of page ids: free pages, cached pages, and holders of the others."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from components.errors import PageLeak
from engine.kv.free_runs import FreeRuns
from engine.kv.offloaded_pages import OffloadedPages
from engine.kv.prefix_cache import PrefixCache

SPARE: Final = 1 / 16  # at most this share of unheld pages is evicted only for neighbours


class PagePool:
    """Every page is *free*, *cached* (unreferenced, but in the prefix cache) or *held*.

    With `offloaded`, evicted pages move there, and the prefix cache has their ids instead. `hold` brings them back.
    """

    def __init__(self, num_pages: int, prefix: PrefixCache, offloaded: OffloadedPages | None = None) -> None:
        self.num_pages = num_pages
        self._prefix = prefix
        self._offloaded = offloaded
        self._free = FreeRuns(num_pages)
        # oldest release first; a dict would skip all deleted keys to find its first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._broken: set[int] = set()  # not to be published before they are allocated anew

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
        """Pages of the pool that `hold` would make unavailable."""
        return sum(1 for page in pages if page in self._cached)

    def num_offloaded_among(self, pages: Sequence[int]) -> int:
        """Pages for which `hold` would allocate others."""
        return 0 if self._offloaded is None else sum(1 for page in pages if page >= self.num_pages)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Hold `count` pages, at most `num_available`, if possible neighbours of each other and of `after`.

        Evicts some more pages than needed if free ones are scattered: a full pool has hardly two neighbours.
        """
        free = self._free
        self._evict(count - len(free))
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
        """Share pages of the prefix cache. Restore those that were offloaded.

        Returns: `found`, with pages of the pool for these.
        """
        offloaded = [page for page in found if page >= self.num_pages]
        if self._offloaded is None or not offloaded:
            self.share(found)
            return list(found)
        self.share([page for page in found if page < self.num_pages])  # else they could be evicted now
        self._offloaded.leave(offloaded)
        before = found.index(offloaded[0]) - 1
        fresh = self.allocate(len(offloaded), after=found[before] if before >= 0 else None)
        self._offloaded.restore(offloaded, fresh)
        page_of = dict(zip(offloaded, fresh, strict=True))
        return [page_of.get(page, page) for page in found]

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Release the last page first, so that eviction shortens prefixes from the end.

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
        """Unpublish a block, if it is published."""
        page = self._prefix.page_of(block)
        if page is None:
            return
        self._prefix.forget(page)
        if page in self._cached:
            del self._cached[page]
            self._free.give([page])
        elif self._offloaded is not None and page >= self.num_pages:
            self._offloaded.drop(page)

    def distrust(self, pages: Sequence[int]) -> None:
        """Unpublish held pages whose KV may be broken. Other holders must not publish them again."""
        for page in pages:
            if page in self._prefix:
                self._prefix.forget(page)
        self._broken.update(pages)

    def trusts(self, pages: Sequence[int]) -> bool:
        return not self._broken or self._broken.isdisjoint(pages)

    def check(self) -> None:
        """Raises: PageLeak, unless each page is free, cached or held once."""
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
            self._offloaded.check()

    def _evict(self, count: int) -> None:
        oldest = [self._cached.popitem(last=False)[0] for _ in range(min(count, len(self._cached)))]
        if self._offloaded is not None:
            self._offloaded.keep(oldest)
        else:
            for page in oldest:
                self._prefix.forget(page)
        self._free.give(oldest)
