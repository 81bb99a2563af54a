"""The number of pages in the pool."""

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.config import EngineConfig


def count_pages(config: EngineConfig, layout: KvLayout) -> int:
    """Raises: WrongSettings, if kv_memory_gb holds no page."""
    if config.num_pages is not None:
        return config.num_pages
    pages = int(config.kv_memory_gb * 1e9) // layout.page_bytes
    if pages < 1:
        raise WrongSettings(
            f"setting engine.kv_memory_gb: {config.kv_memory_gb:g} GB hold no page of {layout.page_bytes} bytes"
        )
    return pages
