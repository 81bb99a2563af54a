"""Chained block hashes name full pages, so equal prefixes share them."""

from collections.abc import Iterable, Sequence

from engine.ports import CacheEvent


class PrefixCache:
    """`PagePool` owns the pages.

    Other threads may call `match` for a hint; the rest belongs to the engine's thread.
    """

    def __init__(self, *, tells: bool = False) -> None:
        """If it `tells`, the caller must take events."""
        self.events: list[CacheEvent] = []
        self._tells = tells
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._hash_of

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of `hashes`."""
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
        """Name full pages; a block keeps its page."""
        for block, page in zip(hashes, pages, strict=True):
            if block not in self._page_of and page not in self._hash_of:
                self._page_of[block] = page
                self._hash_of[page] = block
                if self._tells:
                    self.events.append((block, True))

    def forget(self, page: int) -> None:
        block = self._hash_of.pop(page)
        del self._page_of[block]
        if self._tells:
            self.events.append((block, False))

    def take_events(self) -> list[CacheEvent]:
        taken, self.events = self.events, []
        return taken
