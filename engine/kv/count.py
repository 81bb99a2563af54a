"""How many pages a pool has."""

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.config import EngineConfig


def count_pages(config: EngineConfig, layout: KvLayout) -> int:
    """Pages that the settings ask for. Raises: WrongSettings, when kv_memory_gb holds not even one."""
    if config.num_pages is not None:
        return config.num_pages
    pages = int(config.kv_memory_gb * 1e9) // layout.page_bytes
    if pages < 1:
        raise WrongSettings(
            f"setting engine.kv_memory_gb: {config.kv_memory_gb:g} GB hold no page of {layout.page_bytes} bytes"
        )
    return pages
