"""The pages of a simulated worker: a bounded pool with cached prompts."""

from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """A pool of pages with cached blocks, named by hash, of which the least recently used are evicted first.

    A page is private to a request, or a block that requests share (`_shared`, with their number), or an unused cached
    block (`_idle`). A page has the size of a block of the trace.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0  # private and shared pages
        self._shared: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self.stored: list[bytes] = []  # stored blocks since the last `take_changes`
        self.removed: list[bytes] = []

    @property
    def cached(self) -> int:
        return len(self._idle)

    def match(self, blocks: Sequence[bytes], most: int) -> int:
        shared, idle = self._shared, self._idle
        found = 0
        for block in blocks:
            if found == most or (block not in shared and block not in idle):
                break
            found += 1
        return found

    def take(self, blocks: Sequence[bytes], pages: int) -> bool:
        """Share `blocks`, which are cached, and allocate `pages` more. Return False, without effect, if there is no room."""
        idle, shared = self._idle, self._shared
        waking = sum(1 for block in blocks if block in idle)
        if self.used + waking + pages > self.total:
            return False
        for block in blocks:
            if block in idle:
                del idle[block]
            shared[block] = shared.get(block, 0) + 1
        self.used += waking + pages
        while self.used + len(idle) > self.total:
            self.removed.append(idle.popitem(last=False)[0])
        return True

    def publish(self, blocks: Sequence[bytes]) -> list[bytes]:
        """Convert a request's private pages to shared blocks.

        Returns: the blocks that became shared; another request may already have published the others.
        """
        mine = [block for block in blocks if block not in self._shared and block not in self._idle]
        for block in mine:
            self._shared[block] = 1
        self.stored += mine
        return mine

    def give_back(self, blocks: Sequence[bytes], pages: int) -> None:
        """Release blocks and pages. The last block of a prompt is evicted before its parents."""
        shared = self._shared
        for block in reversed(blocks):
            count = shared[block] - 1
            if count:
                shared[block] = count
            else:
                del shared[block]
                self._idle[block] = None
                self.used -= 1
        self.used -= pages

    def take_changes(self) -> tuple[list[bytes], list[bytes]] | None:
        """Return the blocks stored and removed since the last call; None if there are none."""
        if not self.stored and not self.removed:
            return None
        changes = (self.stored, self.removed)
        self.stored, self.removed = [], []
        return changes
