"""The number of pages in the pool."""

from typing import Final

from components.startup import WrongSettings
from components.wire.layout import KvLayout, largest_shard
from engine.config import EngineConfig

CPU_GB: Final = 1.0


def count_pages(config: EngineConfig, layout: KvLayout) -> int:
    """The number that a rank with the most KV heads has room for.

    Raises: WrongSettings, if kv_memory_gb holds no page.
    """
    return asked_pages(config, layout) or _held_by(CPU_GB, layout)


def asked_pages(config: EngineConfig, layout: KvLayout) -> int | None:
    """The number that the settings fix; None: they fix none.

    Raises: WrongSettings, if kv_memory_gb holds no page.
    """
    if config.num_pages is not None or config.kv_memory_gb is None:
        return config.num_pages
    return _held_by(config.kv_memory_gb, layout)


def _held_by(memory_gb: float, layout: KvLayout) -> int:
    page_bytes = largest_shard(layout).page_bytes
    pages = int(memory_gb * 1e9) // page_bytes
    if pages < 1:
        raise WrongSettings(f"setting engine.kv_memory_gb: {memory_gb:g} GB hold no page of {page_bytes} bytes")
    return pages
