"""Which page holds which block: chained block hashes name full pages, so equal prefixes share them."""

from collections.abc import Iterable, Sequence

from engine.ports import CacheEvent


class PrefixCache:
    """A two-way map between block hashes and pages. `PagePool` owns the pages and says when one must be forgotten.

    `match` reads one dict, so other threads may call it for a hint; the rest belongs to the engine's thread.
    """

    def __init__(self, *, tells: bool = False) -> None:
        """`tells`: collect events, which the caller must take."""
        self.events: list[CacheEvent] = []  # not taken yet
        self._tells = tells
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        """Whether `page` can be found by its tokens."""
        return page in self._hash_of

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of the chain `hashes`."""
        pages: list[int] = []
        for block in hashes:
            page = self._page_of.get(block)
            if page is None:
                break
            pages.append(page)
        return pages

    def blocks(self) -> list[bytes]:
        return list(self._page_of)

    def insert(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """Name full pages with KV. A block that another page holds keeps that page."""
        for block, page in zip(hashes, pages, strict=True):
            if block not in self._page_of and page not in self._hash_of:
                self._page_of[block] = page
                self._hash_of[page] = block
                if self._tells:
                    self.events.append((block, True))

    def forget(self, page: int) -> None:
        """`page` is about to be overwritten."""
        block = self._hash_of.pop(page)
        del self._page_of[block]
        if self._tells:
            self.events.append((block, False))

    def take_events(self) -> list[CacheEvent]:
        """Since the last call, in order."""
        taken, self.events = self.events, []
        return taken
