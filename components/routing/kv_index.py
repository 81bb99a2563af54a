"""Which instances hold which block, by chained block hash, so that one walk along a prompt tells how much each has cached.

A block's holders are a bit mask, one bit for each instance: a Python integer. Equal masks are one object where possible, so a
block costs its hash and its place in a dictionary, about 110 bytes (`python -m bench.routing` measures it). An instance that
goes takes its bit with it at once, because a lookup begins with the bits of those that are there; what it leaves in the
masks is swept out little by little by whoever adds blocks, and only then its bit is given to another.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count
from typing import Final

MAX_BLOCKS: Final = 4_000_000
ROOMY: Final = 1 / 16  # of what it may hold
SHARDS: Final = 256  # by a hash's first byte: a dictionary of millions would stand still for as long as it grows
INTERNED: Final = 1 << 16  # masks
# One bit in so many, or more: all bits are looked at faster, as text, than each that is set is found by arithmetic.
MANY: Final = 24
AS_NUMBERS: Final = bytes.maketrans(b"01", b"\0\1")
SWEPT_PER_ADD: Final = 4  # blocks looked at for each block added, while there is something to sweep


class KvIndex:
    """Blocks and their holders, at most `max_blocks`: one too many is refused, and counted.

    Refused, because the index mirrors caches that evict by themselves: there is room again as soon as they do, and whoever
    was refused something asks for it again then (`Follower.missing`). What is refused is the end of a prefix rather than its
    beginning, which came before it.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_blocks = 0  # those of instances that have gone included, until they are swept out
        self.refused = 0  # blocks, since start
        self.max_blocks = max_blocks
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._masks: dict[int, int] = {}  # each mask by itself: one object for equal ones
        self._slots: dict[str, int] = {}
        self._ids: list[str] = []  # by slot
        self._live = 0  # slots of those that are there
        self._written = 0  # slots that may stand in masks
        self._free: list[int] = []  # slots that stand in no mask
        self._left = 0  # slots of those that have gone, not swept out
        self._sweeping = 0  # of these, those that the pass under way sweeps out
        self._next_shard = 0  # of that pass
        self._credit = 0  # blocks that may be looked at

    @property
    def has_room(self) -> bool:
        """Whether it is worth while to add what was refused before."""
        return self.num_blocks < self.max_blocks * (1 - ROOMY)

    def __contains__(self, instance_id: str) -> bool:
        """Whether the instance was added and not removed."""
        return instance_id in self._slots

    def find(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many of a prompt's blocks each instance holds, counted from the first; those that hold none are left out."""
        shards, alive, mask, depth = self._shards, self._live, -1, 0
        ended: list[tuple[int, int]] = []  # (how many blocks, slots that hold just these)
        for block in block_hashes:  # to the first that nobody holds: those behind it need not be made
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
        """The instance holds these too; it need not be known. Returns: how many were refused."""
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
        """The instance no longer holds these; those that it does not hold are ignored."""
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

    def remove(self, instance_id: str) -> None:
        """The instance is gone, or holds nothing any more: at once, however many blocks it had."""
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
        """All that one instance holds. It walks the whole index: for tests and for those who look into it."""
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
        """The one object for this mask."""
        if len(self._masks) >= INTERNED:
            self._masks = {}
        return self._masks.setdefault(mask, mask)

    def _sweep(self, added: int) -> None:
        """Go on sweeping out the bits of those that have gone, a whole shard at a time, as far as `added` blocks pay for."""
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
        """No mask has these bits any more: the slots are as good as new."""
        self._free.extend(_bits(self._sweeping))
        self._written &= ~self._sweeping
        self._left &= ~self._sweeping
        self._sweeping = 0


def _bits(mask: int) -> list[int]:
    """Positions of the bits that are set."""
    if mask.bit_count() * MANY > mask.bit_length():
        return list(compress(count(), bin(mask)[:1:-1].encode().translate(AS_NUMBERS)))
    found: list[int] = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
