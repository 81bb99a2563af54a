"""Which instances probably hold which block, from where requests were sent: for workers that tell of no KV events."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from components.routing.kv_index import KvIndex

TTL_S: Final = 120.0
MAX_BLOCKS: Final = 500_000
EXPIRED_PER_CALL: Final = 4096  # after a long silence the rest goes with later calls


class ApproximateIndex:
    """A block is where requests with it were sent, for `ttl_s` after the last such request.

    At most `max_blocks` pairs of block and instance; past that, those of the oldest requests are forgotten before their time.
    The caller removes an instance that has gone or registered anew.
    """

    def __init__(
        self, ttl_s: float = TTL_S, max_blocks: int = MAX_BLOCKS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._clock = clock
        self._index = KvIndex(max_blocks)
        self._expires: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # the soonest first

    def __len__(self) -> int:
        """Pairs of block and instance, those of instances that were removed included until they expire."""
        return len(self._expires)

    def find(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many of a prompt's blocks each instance probably holds, counted from the first."""
        self._expire()
        return self._index.find(block_hashes)

    def routed(self, instance_id: str, block_hashes: Sequence[bytes]) -> None:
        """A request with these blocks was sent to the instance; of one that is too long only the beginning is kept."""
        self._expire()
        blocks = block_hashes[: self._max_blocks]
        expires_s = self._clock() + self._ttl_s
        for block in reversed(blocks):  # a beginning without its end is of use, an end without its beginning is not
            pair = (instance_id, block)
            self._expires[pair] = expires_s
            self._expires.move_to_end(pair)
        while len(self._expires) > self._max_blocks:
            self._forget_first()
        self._index.add(instance_id, blocks)

    def remove(self, instance_id: str) -> None:
        """The instance is gone: nothing is there any more."""
        self._index.remove(instance_id)

    def _expire(self) -> None:
        now = self._clock()
        for _ in range(min(EXPIRED_PER_CALL, len(self._expires))):
            if next(iter(self._expires.values())) > now:
                return
            self._forget_first()

    def _forget_first(self) -> None:
        (instance_id, block), _ = self._expires.popitem(last=False)
        self._index.discard(instance_id, (block,))
