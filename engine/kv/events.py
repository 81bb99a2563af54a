"""What the prefix cache gained and lost, for routers that want to know where a prompt's pages are."""

from collections.abc import Iterable, Iterator

from engine.ports import BlockRemoved, BlockStored, CacheEvent


class CacheEvents:
    """Collects changes of one prefix cache until a step takes them away, and knows every block's parent for a dump."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._parent_of: dict[bytes, bytes] = {}
        self._pending: list[CacheEvent] = []

    def __len__(self) -> int:
        """Changes that no step has taken yet."""
        return len(self._pending)

    def stored(self, block: bytes, parent: bytes) -> None:
        """`block` can be found from now on."""
        self._parent_of[block] = parent
        self._pending.append(BlockStored(block, parent, self._page_size))

    def removed(self, block: bytes) -> None:
        """`block` can no longer be found."""
        del self._parent_of[block]
        self._pending.append(BlockRemoved(block))

    def take(self) -> list[CacheEvent]:
        """The changes since the last call, in order."""
        taken, self._pending = self._pending, []
        return taken

    def blocks(self) -> list[BlockStored]:
        """Everything that can be found now, as events that would build it anew."""
        return [BlockStored(block, parent, self._page_size) for block, parent in self._parent_of.items()]


def block_changes(events: Iterable[CacheEvent]) -> Iterator[tuple[bytes, bool]]:
    """What a publisher is fed: blocks, and whether each was stored or removed."""
    for event in events:
        yield event.block, isinstance(event, BlockStored)
