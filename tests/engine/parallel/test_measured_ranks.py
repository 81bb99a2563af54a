"""Each rank measures its own device, and the one with the least memory decides."""

from pathlib import Path

import pytest

from components.startup import WrongSettings
from components.wire.layout import largest_shard
from engine.build import assemble_led
from engine.core.engine_core import EngineCore
from engine.device import huge_pages
from engine.kv.count import count_pages
from engine.ports import EngineRequest
from tests.engine.device.counted_memory import CountedMemory
from tests.engine.parallel.led import Led, led
from tests.engine.parallel.measured_follower import BYTES
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, save_tiny, small

FOLLOWER = "tests.engine.parallel.measured_follower"
SMALL, LARGE = 14_000_000, 24_000_000


def assembled(instance: Led) -> tuple[EngineCore, int]:
    """Return an engine whose leader has LARGE bytes, and the free bytes."""
    config = small(tensor_parallel=2, num_pages=None, max_running=6, max_step_tokens=32)
    with CountedMemory(LARGE, instance.loaded) as memory:
        return assemble_led(instance.loaded, config, instance.followers, memory=memory), memory.measure().free


def test_the_smallest_number_of_pages_counts(
    tiny_dir: Path, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BYTES, str(SMALL))
    monkeypatch.setattr(huge_pages, "BLOCK_BYTES", 0)
    with led(tiny_dir, 2, module=FOLLOWER) as instance:
        engine, left = assembled(instance)
        pages = engine.kv_region.num_pages
        assert 0.5 * SMALL < pages * engine.kv_region.layout.page_bytes < 0.9 * SMALL
        assert left > 0.3 * LARGE, "of the larger device much stays free"
        request = EngineRequest("r", prompt(50), greedy(8))
        assert run(engine, [request]).tokens == run(make_engine(load_tiny(tiny_dir)), [request]).tokens
        tight = small(tensor_parallel=2, num_pages=None, gpu_memory_utilization=0.01)
        with (
            CountedMemory(LARGE, instance.loaded) as memory,
            pytest.raises(WrongSettings, match="too little memory on rank 1: KV pages for one request need"),
        ):
            assemble_led(instance.loaded, tight, instance.followers, memory=memory)


def test_a_rank_with_more_heads_has_room_for_fewer_pages(
    tmp_path: Path, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny(tmp_path / "tiny", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    monkeypatch.setenv(BYTES, str(LARGE))
    monkeypatch.setattr(huge_pages, "BLOCK_BYTES", 0)
    with led(directory, 2, module=FOLLOWER) as instance:
        engine, _ = assembled(instance)
        layout = engine.kv_region.layout
        assert largest_shard(layout).page_bytes == 2 * layout.page_bytes
        assert 0.5 * LARGE < engine.kv_region.num_pages * largest_shard(layout).page_bytes < 0.9 * LARGE
        fixed = small(tensor_parallel=2, num_pages=None, kv_memory_gb=0.001)
        assert count_pages(fixed, layout) == 1_000_000 // (2 * layout.page_bytes)
