"""Mirror one instance's prefix cache from KV events, with a dump after each gap. No I/O."""

from collections.abc import Iterable
from typing import Final, Protocol

from components.wire.kv_events import KvEventBatch

MAX_HELD: Final = 1024  # batches of most of a minute
MAX_HELD_BLOCKS: Final = 1 << 18  # 4 MB of hashes


class BlockIndex(Protocol):
    @property
    def has_room(self) -> bool:
        pass

    def add(self, instance_id: str, blocks: Iterable[bytes]) -> int:
        """Returns: number of refused blocks."""

    def discard(self, instance_id: str, blocks: Iterable[bytes]) -> None:
        pass

    def remove(self, instance_id: str) -> None:
        pass

    def sweep(self, num_blocks: int) -> bool:
        """Free removed instances' room. Returns whether there may be more."""


class KvFollower:
    """Applies batches, which may arrive out of order, twice, or never. While a dump is needed, they are held back."""

    def __init__(self, instance_id: str, epoch: str, index: BlockIndex) -> None:
        self.instance_id = instance_id
        self.epoch = epoch
        self.needs_dump = True
        self.number: int | None = None  # of the last applied batch; None: no dump yet, or one in progress
        self.gaps = 0
        self.missing = 0  # upper bound of refused blocks, which need a new dump
        self._index = index
        self._held: dict[int, KvEventBatch] = {}
        self._held_blocks = 0  # counts repeated batches twice
        self._became_stale = False  # since the dump was requested

    def received(self, batch: KvEventBatch) -> None:
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

    def mark_stale(self) -> None:
        self.needs_dump = self._became_stale = True

    def dump_asked(self) -> int | None:
        """The number for the dump request. A worker without a later batch sends no dump."""
        self._became_stale = False
        return None if self.missing else self.number

    def dump_begins(self) -> None:
        self.number, self.missing = None, 0
        self._index.remove(self.instance_id)

    def dump_part(self, blocks: Iterable[bytes]) -> None:
        self.missing += self._index.add(self.instance_id, blocks)

    def dump_ends(self, number: int) -> None:
        self.number = number
        self.needs_dump = self._became_stale
        held, self._held, self._held_blocks = self._held, {}, 0
        for at in sorted(held):
            self.received(held[at])

    def forget(self) -> None:
        self.needs_dump = True
        self.dump_begins()

    def _hold(self, batch: KvEventBatch) -> None:
        if len(self._held) >= MAX_HELD or self._held_blocks >= MAX_HELD_BLOCKS:
            self._held.clear()  # the gap will show after the dump
            self._held_blocks = 0
        self._held[batch.number] = batch
        self._held_blocks += len(batch.stored) + len(batch.removed)
