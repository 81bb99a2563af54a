"""The shape and place of KV pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from components.errors import IncompatibleLayout
from components.wire.codec import Struct

LAYOUT_VERSION: Final = 1
SHARDED_VERSION: Final = 2  # of a layout with shards; older processes refuse it
UNDERSTOOD: Final = (LAYOUT_VERSION, SHARDED_VERSION)
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1}


class KvLayout(Struct):
    """A page is [heads, layers, 2, page_size, head_dim], with the heads of one shard.

    With heads first, a tensor-parallel rank's share is contiguous. NIXL's cost is per descriptor, so a page holds all layers.
    """

    model: str
    dtype: Literal["bfloat16", "float16", "float32", "fp8_e4m3"]  # of keys and values
    page_size: int  # tokens
    layers: int
    kv_heads: int  # of the model
    head_dim: int
    version: int = LAYOUT_VERSION
    shards: int = 1  # ranks of the instance
    shard: int = 0

    @property
    def text(self) -> str:
        """For people. Instances are compatible if the texts differ in page size at most."""
        shown = of_whole(self)
        names = [n for n in self.__struct_fields__ if n not in {"shards", "shard"}]
        return " ".join(f"{name}={getattr(shown, name)}" for name in names)

    @property
    def heads(self) -> range:
        """KV heads of this shard. If there are more shards than heads, several have the same.

        If the shards do not divide the heads, some have one more than the first, and the last is one of them.
        """
        first = self.shard * self.kv_heads // self.shards
        return range(first, max(first + 1, (self.shard + 1) * self.kv_heads // self.shards))

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def page_bytes(self) -> int:
        return self.num_stripes * self.page_size * self.row_bytes

    @property
    def num_stripes(self) -> int:
        """A stripe is one head's keys or values in one layer."""
        return self.num_heads * self.layers * 2

    @property
    def row_bytes(self) -> int:
        return self.head_dim * DTYPE_BYTES[self.dtype]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def of_shard(layout: KvLayout, shard: int, shards: int) -> KvLayout:
    """The layout of one of `shards` ranks; with one it is unchanged."""
    if shards == 1:
        return layout
    return msgspec.structs.replace(layout, version=SHARDED_VERSION, shards=shards, shard=shard)


def largest_shard(layout: KvLayout) -> KvLayout:
    """The layout of a rank with the most heads."""
    return of_shard(layout, layout.shards - 1, layout.shards)


def of_whole(layout: KvLayout) -> KvLayout:
    """The layout of an instance on one device."""
    if layout.version != SHARDED_VERSION:
        return layout
    return msgspec.structs.replace(layout, version=LAYOUT_VERSION, shards=1, shard=0)


def can_shard(kv_heads: int, shards: int) -> bool:
    """Return whether each shard has whole heads, and each head equally many shards."""
    return shards <= kv_heads or (kv_heads > 0 and shards % kv_heads == 0)


def check_compatible(ours: KvLayout, theirs: KvLayout) -> None:
    """One page size must divide the other, and `can_shard` must allow the ranks of each. All else must be equal.

    Raises: IncompatibleLayout.
    """
    if ours == theirs:
        return
    different = [n for n in KvLayout.__struct_fields__ if getattr(ours, n) != getattr(theirs, n) and n != "shard"]
    if ours.version in UNDERSTOOD and theirs.version in UNDERSTOOD:
        different = [n for n in different if n != "version"]
    if all(layout.shards > 0 and can_shard(layout.kv_heads, layout.shards) for layout in (ours, theirs)):
        different = [n for n in different if n != "shards"]
    small, large = sorted((ours.page_size, theirs.page_size))
    if small > 0 and large % small == 0:
        different = [n for n in different if n != "page_size"]
    if different:
        named = ", ".join(f"{n}: {getattr(ours, n)} here, {getattr(theirs, n)} there" for n in different)
        raise IncompatibleLayout(f"prefill and decode must load the same model in the same layout ({named})")


def check_same_adapter(name: str, ours: str, theirs: str) -> None:
    if ours != theirs:
        raise IncompatibleLayout(
            f"prefill and decode must load the same weights as adapter {name!r} ({ours} here, {theirs} there)"
        )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A follower's page pool, of as many pages as the leader's."""

    pid: int
    device: str
    address: int
    socket_path: str  # if the follower has a transfer end


@dataclass(frozen=True, slots=True)
class KvRegion:
    """The page pool's memory, as NIXL registers it."""

    address: int  # of page 0
    num_pages: int
    layout: KvLayout  # of this process's rank
    device: str  # torch's name, such as "cuda:0"
    followers: Sequence[RankMemory] = ()  # from rank 1 on

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes
