"""Which page holds which block of tokens, by block hash."""

from collections.abc import Iterable, Sequence

from engine.ports import CacheEvent


class PrefixCache:
    """Chained block hashes name full pages, so equal prefixes share them. `PagePool` owns the pages.

    Other threads may call `match` for a hint; the rest belongs to the engine's thread.
    """

    def __init__(self, *, records_events: bool = False) -> None:
        """If it `records_events`, the caller must take them."""
        self.events: list[CacheEvent] = []
        self._records_events = records_events
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

    def match_last(self, hashes: Sequence[bytes], count: int) -> tuple[int, list[int]]:
        """Pages of the last `count` blocks of the longest prefix of `hashes` of which these are known.

        Returns: the number of blocks before them, and the pages.
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
        """Name full pages; a block keeps its page."""
        for block, page in zip(hashes, pages, strict=True):
            if block not in self._page_of and page not in self._hash_of:
                self._page_of[block] = page
                self._hash_of[page] = block
                if self._records_events:
                    self.events.append((block, True))

    def move(self, page: int, to: int) -> None:
        """Rename a block's page."""
        block = self._hash_of.pop(page)
        self._page_of[block] = to
        self._hash_of[to] = block

    def forget(self, page: int) -> None:
        block = self._hash_of.pop(page)
        del self._page_of[block]
        if self._records_events:
            self.events.append((block, False))

    def take_events(self) -> list[CacheEvent]:
        taken, self.events = self.events, []
        return taken
