"""How many ranks a model can have, and which query heads each has."""

from components.wire.layout import KvLayout, can_shard
from engine.errors import UnsupportedModel


def check_heads(name: str, heads: int, kv_heads: int, size: int) -> None:
    """Raises: UnsupportedModel, if `size` ranks cannot divide the heads."""
    if not _can_cut(heads, kv_heads, size):
        possible = [n for n in range(1, heads + 1) if _can_cut(heads, kv_heads, n)]
        raise UnsupportedModel(
            f"tensor_parallel={size}: {name} has {heads} query heads and {kv_heads} KV heads; "
            f"it can be cut into {', '.join(map(str, possible))}"
        )


def _can_cut(heads: int, kv_heads: int, size: int) -> bool:
    return can_shard(kv_heads, size) and (size <= kv_heads or heads % size == 0)


def query_heads(heads: int, layout: KvLayout) -> range:
    """Return the query heads that read a rank's KV heads, or a part of them if ranks share a KV head."""
    if layout.shards > layout.kv_heads:
        each = heads // layout.shards
        return range(layout.shard * each, (layout.shard + 1) * each)
    group = heads // layout.kv_heads
    return range(layout.heads.start * group, layout.heads.stop * group)
