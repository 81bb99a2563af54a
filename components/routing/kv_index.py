"""Index of which instances hold which blocks.

Each block has a bit mask of instances; equal masks may share an object: 110 bytes a block. A removed instance's bits are
ignored, and swept in small steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count
from typing import Final

MAX_BLOCKS: Final = 4_000_000
FREE_SHARE_TO_REFETCH: Final = 1 / 16  # of `max_blocks`; then refused blocks are requested again
SHARDS: Final = 256  # by a hash's first byte; a resize of one large dictionary would stop the process
INTERNED: Final = 1 << 16  # masks kept for sharing
MAX_BITS_PER_SET_BIT: Final = 24  # if more than one bit in this many is set, it is faster to scan the mask as text
AS_NUMBERS: Final = bytes.maketrans(b"01", b"\0\1")
SWEPT_PER_ADD: Final = 4  # blocks


class KvIndex:
    """Holds at most `max_blocks`, and refuses more until evictions make room: see `KvFollower.missing`."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_blocks = 0  # also those of removed instances, until they are swept
        self.refused = 0
        self.max_blocks = max_blocks
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._masks: dict[int, int] = {}
        self._slots: dict[str, int] = {}
        self._ids: list[str] = []
        self._live = 0  # mask of the slots in use
        self._written = 0  # slots that masks may have
        self._free: list[int] = []  # slots in no mask
        self._left = 0  # mask of removed, unswept slots
        self._sweeping = 0  # of the current pass
        self._next_shard = 0
        self._credit = 0  # blocks to sweep

    @property
    def has_room(self) -> bool:
        return self.num_blocks < self.max_blocks * (1 - FREE_SHARE_TO_REFETCH)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._slots

    def find(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many leading blocks each instance holds, without zeros."""
        shards, alive, mask, depth = self._shards, self._live, -1, 0
        ended: list[tuple[int, int]] = []  # (number of blocks, slots with exactly these)
        for block in block_hashes:  # hashed on demand, up to the first unknown block
            at = shards[block[0]].get(block, 0)
            if at is not mask:
                mask, before = at, alive
                alive &= at
                if depth and alive != before:
                    ended.append((depth, before ^ alive))
                if not alive:
                    break
            depth += 1
        if depth:
            ended.append((depth, alive))
        return {self._ids[slot]: depth for depth, slots in ended for slot in _bits(slots)}

    def add(self, instance_id: str, blocks: Iterable[bytes]) -> int:
        bit = self._bit_of(instance_id)
        self._written |= bit
        shards, live, looked, refused = self._shards, self._live, 0, 0
        for block in blocks:
            looked += 1
            shard = shards[block[0]]
            mask = shard.get(block)
            if mask is not None:
                if not mask & bit:
                    shard[block] = self._shared(mask & live | bit)
            elif self.num_blocks < self.max_blocks:
                shard[block] = bit
                self.num_blocks += 1
            else:
                refused += 1
        self.refused += refused
        if self._left:
            self._sweep(looked)
        return refused

    def discard(self, instance_id: str, blocks: Iterable[bytes]) -> None:
        slot = self._slots.get(instance_id)
        if slot is None:
            return
        bit = 1 << slot
        others = self._live & ~bit
        for block in blocks:
            shard = self._shards[block[0]]
            mask = shard.get(block, 0)
            if not mask & bit:
                continue
            if rest := mask & others:
                shard[block] = self._shared(rest)
            else:
                del shard[block]
                self.num_blocks -= 1

    def sweep(self, num_blocks: int) -> bool:
        """Remove blocks that only removed instances had. Return whether there may be more."""
        self._credit += num_blocks
        self._sweep(0)
        return self._left != 0

    def remove(self, instance_id: str) -> None:
        slot = self._slots.pop(instance_id, None)
        if slot is None:
            return
        bit = 1 << slot
        self._live &= ~bit
        if self._written & bit:
            self._left |= bit
        else:
            self._free.append(slot)

    def blocks_of(self, instance_id: str) -> set[bytes]:
        slot = self._slots.get(instance_id)
        bit = 0 if slot is None else 1 << slot
        return {block for shard in self._shards for block, mask in shard.items() if mask & bit}

    def _bit_of(self, instance_id: str) -> int:
        slot = self._slots.get(instance_id)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._ids)
            self._ids[slot : slot + 1] = [instance_id]
            self._slots[instance_id] = slot
            self._live |= 1 << slot
        return self._shared(1 << slot)

    def _shared(self, mask: int) -> int:
        if len(self._masks) >= INTERNED:
            self._masks = {}
        return self._masks.setdefault(mask, mask)

    def _sweep(self, added: int) -> None:
        self._credit += SWEPT_PER_ADD * (added + 1)
        while self._left and self._credit >= len(self._shards[self._next_shard]):
            if not self._next_shard:
                self._sweeping = self._left
            self._credit -= len(self._shards[self._next_shard]) + 1
            self._sweep_shard(self._shards[self._next_shard])
            self._next_shard = (self._next_shard + 1) % SHARDS
            if not self._next_shard:
                self._swept()
        if not self._left:
            self._credit = 0

    def _sweep_shard(self, shard: dict[bytes, int]) -> None:
        sweeping, live = self._sweeping, self._live
        for block in [block for block, mask in shard.items() if mask & sweeping]:
            if rest := shard[block] & live:
                shard[block] = self._shared(rest)
            else:
                del shard[block]
                self.num_blocks -= 1

    def _swept(self) -> None:
        self._free.extend(_bits(self._sweeping))
        self._written &= ~self._sweeping
        self._left &= ~self._sweeping
        self._sweeping = 0


def _bits(mask: int) -> list[int]:
    if mask.bit_count() * MAX_BITS_PER_SET_BIT > mask.bit_length():
        return list(compress(count(), bin(mask)[:1:-1].encode().translate(AS_NUMBERS)))
    found: list[int] = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
