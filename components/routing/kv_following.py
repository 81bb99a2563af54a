"""From numbered batches and dumps to the blocks that one instance holds: exactly those, or a dump is needed. No I/O."""

from collections.abc import Iterable
from typing import Final, Protocol

from components.wire.kv_events import KvEventBatch

MAX_HELD: Final = 1024  # batches that wait for a dump: at 20 a second, most of a minute
MAX_HELD_BLOCKS: Final = 1 << 18  # in these, 4 MB of hashes


class BlockIndex(Protocol):
    """What is kept up to date: a `KvIndex`."""

    @property
    def has_room(self) -> bool:
        """Whether there is room for much."""

    def add(self, instance_id: str, blocks: Iterable[bytes]) -> int:
        """The instance holds these too. Returns: how many of them there was no room for."""

    def discard(self, instance_id: str, blocks: Iterable[bytes]) -> None:
        """The instance no longer holds these."""

    def remove(self, instance_id: str) -> None:
        """The instance holds nothing."""


class Follower:
    """One instance in one epoch, as its batches arrive: in order, twice, or not at all.

    While a dump is needed, batches are held; what the index says of the instance then is what it was before, until
    the dump begins. A dump says everything up to its number, so the batches that were held are taken up from the
    next one on.
    """

    def __init__(self, instance_id: str, epoch: str, index: BlockIndex) -> None:
        self.instance_id = instance_id
        self.epoch = epoch
        self.needs_dump = True
        self.number: int | None = None  # of the batch up to which the index is right; None: it is not
        self.gaps = 0  # seen
        self.missing = 0  # blocks that the index had no room for, at most; a dump brings those that are still held
        self._index = index
        self._held: dict[int, KvEventBatch] = {}
        self._held_blocks = 0  # in batches that came, the doubled ones counted twice
        self._doubted = False  # since the dump was asked for

    def received(self, batch: KvEventBatch) -> None:
        """A batch of this instance and epoch."""
        if self.needs_dump or self.number is None:
            self._hold(batch)
        elif batch.number == self.number + 1:
            self._index.discard(self.instance_id, batch.removed)
            self.missing += self._index.add(self.instance_id, batch.stored)
            self.number = batch.number
        elif batch.number > self.number:
            self.gaps += 1
            self.needs_dump = True
            self._hold(batch)

    def doubt(self) -> None:
        """Something may have been lost, so it is time to ask, and to ask again if that was done already."""
        self.needs_dump = self._doubted = True

    def dump_asked(self) -> int | None:
        """The number to ask with: none needs to be sent if it is the worker's."""
        self._doubted = False
        return None if self.missing else self.number

    def dump_begins(self) -> None:
        """What was known is out of date."""
        self.number, self.missing = None, 0
        self._index.remove(self.instance_id)

    def dump_part(self, blocks: Iterable[bytes]) -> None:
        """Some of what the instance holds."""
        self.missing += self._index.add(self.instance_id, blocks)

    def dump_ends(self, number: int) -> None:
        """The index is right up to batch `number`; take up what has arrived since. A dump may be needed again then."""
        self.number = number
        self.needs_dump = self._doubted
        held, self._held, self._held_blocks = self._held, {}, 0
        for at in sorted(held):
            self.received(held[at])

    def forget(self) -> None:
        """The instance cannot be asked, or is gone: it holds nothing that we know of."""
        self.needs_dump = True
        self.dump_begins()

    def _hold(self, batch: KvEventBatch) -> None:
        if len(self._held) >= MAX_HELD or self._held_blocks >= MAX_HELD_BLOCKS:
            self._held.clear()  # the gap shows when the dump is there
            self._held_blocks = 0
        self._held[batch.number] = batch
        self._held_blocks += len(batch.stored) + len(batch.removed)
