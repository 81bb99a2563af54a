"""The pages of one simulated worker: a bounded pool, of which finished prompts keep what nobody else needs yet."""

from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """Counts pages; blocks that stand in some are known by their hash and evicted least recently used first.

    Every page is private to a request, or a block that requests share (`_shared`, by how many), or a block that none
    uses and that the next may find (`_idle`). A page holds as many tokens as a block of the trace.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0  # private and shared
        self._shared: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self.stored: list[bytes] = []  # since `news`
        self.removed: list[bytes] = []

    @property
    def cached(self) -> int:
        """Blocks that nobody uses."""
        return len(self._idle)

    def match(self, blocks: Sequence[bytes], most: int) -> int:
        """How many leading blocks are here, `most` at most."""
        shared, idle = self._shared, self._idle
        found = 0
        for block in blocks:
            if found == most or (block not in shared and block not in idle):
                break
            found += 1
        return found

    def take(self, blocks: Sequence[bytes], pages: int) -> bool:
        """Share `blocks`, all of which are here, and take `pages` more. False, and nothing taken: there is no room."""
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
        """Private pages of a request become blocks that others find.

        Returns: those that have; what somebody else has published meanwhile stays private.
        """
        mine = [block for block in blocks if block not in self._shared and block not in self._idle]
        for block in mine:
            self._shared[block] = 1
        self.stored += mine
        return mine

    def give_back(self, blocks: Sequence[bytes], pages: int) -> None:
        """What was taken and published. The last block of a prompt is evicted before those it continues."""
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

    def news(self) -> tuple[list[bytes], list[bytes]] | None:
        """Blocks stored and removed since this was asked last; None: none were."""
        if not self.stored and not self.removed:
            return None
        news = (self.stored, self.removed)
        self.stored, self.removed = [], []
        return news
