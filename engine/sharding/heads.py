"""Into how many ranks a model can be cut."""

from components.wire.layout import can_shard
from engine.errors import UnsupportedModel


def check_heads(name: str, heads: int, kv_heads: int, size: int) -> None:
    """Raises: UnsupportedModel."""
    if heads % size or not can_shard(kv_heads, size):
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and can_shard(kv_heads, n)]
        raise UnsupportedModel(
            f"tensor_parallel={size}: {name} has {heads} query heads and {kv_heads} KV heads; "
            f"it can be cut into {', '.join(map(str, possible))}"
        )
