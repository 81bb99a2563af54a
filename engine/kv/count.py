"""The numbers of pages in the pool and of offloaded pages."""

from typing import Final

from components.startup import WrongSettings
from components.wire.layout import KvLayout, largest_shard, of_whole
from engine.config import EngineConfig

CPU_GB: Final = 1.0
STORE_GB: Final = 10.0
STAGING_BYTES: Final = 128 << 20
STAGED_PAGES: Final = range(8, 257)
MOST_GB: Final = 1e9  # more than any machine has; as bytes it still fits into an integer of the system


def count_pages(config: EngineConfig, layout: KvLayout) -> int:
    """Return the number of pages of each rank. Raises: WrongSettings, if kv_memory_gb holds no page."""
    return asked_pages(config, layout) or _held_by(CPU_GB, layout)


def asked_pages(config: EngineConfig, layout: KvLayout) -> int | None:
    """Return the number of pages that the settings fix, if any. Raises: WrongSettings, if kv_memory_gb holds no page."""
    if config.num_pages is not None or config.kv_memory_gb is None:
        return config.num_pages
    return _held_by(config.kv_memory_gb, layout)


def count_offloaded(config: EngineConfig, layout: KvLayout) -> int:
    """Return the number of evicted pages to keep. Raises: WrongSettings, if kv_offload_gb holds no page."""
    return _held_by(config.kv_offload_gb, layout, "kv_offload_gb") if config.kv_offload_gb else 0


def count_staging(config: EngineConfig, layout: KvLayout) -> int:
    """Return the number of pages that may be on their way to or from files."""
    if config.kv_store_dir is None:
        return 0
    return min(max(STAGED_PAGES.start, STAGING_BYTES // of_whole(layout).page_bytes), STAGED_PAGES.stop - 1)


def count_store_bytes(config: EngineConfig, layout: KvLayout) -> int:
    """Return the limit of all files of pages. Raises: WrongSettings, if kv_store_gb holds no page."""
    whole = of_whole(layout)
    return (
        _held_by(STORE_GB if config.kv_store_gb is None else config.kv_store_gb, whole, "kv_store_gb")
        * whole.page_bytes
    )


def _held_by(memory_gb: float, layout: KvLayout, setting: str = "kv_memory_gb") -> int:
    page_bytes = largest_shard(layout).page_bytes
    pages = int(min(memory_gb, MOST_GB) * 1e9) // page_bytes
    if pages < 1:
        raise WrongSettings(f"setting engine.{setting}: {memory_gb:g} GB is less than one page, {page_bytes} bytes")
    return pages
