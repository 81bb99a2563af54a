"""Which page holds which block of tokens: chained block hashes name full pages, so equal prefixes share them."""

from collections.abc import Iterable, Sequence

from engine.ports import CacheEvent


class PrefixCache:
    """A two-way map between block hashes and pages. It owns no page: `PagePool` says when one must be forgotten.

    `match` reads one dict, so another thread may call it for a hint; everything else belongs to whoever has the engine.
    """

    def __init__(self, *, tells: bool = False) -> None:
        """`tells`: which blocks come and go; somebody must take that."""
        self.events: list[CacheEvent] = []  # that nobody has taken yet
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
        """All that can be found, in the order in which they came."""
        return list(self._page_of)

    def insert(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """Name full pages whose KV stands. A block that another page already holds keeps that page."""
        for block, page in zip(hashes, pages, strict=True):
            if block not in self._page_of and page not in self._hash_of:
                self._page_of[block] = page
                self._hash_of[page] = block
                if self._tells:
                    self.events.append((block, True))

    def forget(self, page: int) -> None:
        """`page` is about to be written anew."""
        block = self._hash_of.pop(page)
        del self._page_of[block]
        if self._tells:
            self.events.append((block, False))

    def take_events(self) -> list[CacheEvent]:
        """What came and went since the last call, in order."""
        taken, self.events = self.events, []
        return taken
