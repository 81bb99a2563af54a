"""Estimate which instances hold blocks, for workers without KV events."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

from components.routing.kv_index import KvIndex

TTL_S: Final = 120.0
MAX_BLOCKS: Final = 500_000
BLOCKS_PER_PROMPT: Final = 1024  # 3 ms of the event loop, with their hashes
EXPIRED_PER_CALL: Final = 4096


class ApproximateIndex:
    """Records the first blocks of each routed prompt: enough to send its continuation to the same instance.

    Blocks expire after `ttl_s`. Above `max_blocks` pairs of block and instance, the oldest are evicted.
    """

    def __init__(
        self, ttl_s: float = TTL_S, max_blocks: int = MAX_BLOCKS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._clock = clock
        self._index = KvIndex(max_blocks)
        self._expires: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # soonest first

    def __len__(self) -> int:
        return len(self._expires)

    def find(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        self._expire()
        return self._index.find(block_hashes)

    def routed(self, instance_id: str, block_hashes: Sequence[bytes]) -> None:
        self._expire()
        blocks = list(islice(block_hashes, min(BLOCKS_PER_PROMPT, self._max_blocks)))  # hashed on demand
        expires_s = self._clock() + self._ttl_s
        for block in reversed(blocks):  # later blocks expire first, because they are useless without the earlier ones
            pair = (instance_id, block)
            self._expires[pair] = expires_s
            self._expires.move_to_end(pair)
        while len(self._expires) > self._max_blocks:
            self._forget_first()
        self._index.add(instance_id, blocks)

    def remove(self, instance_id: str) -> None:
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
