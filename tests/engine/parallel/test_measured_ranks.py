"""Each rank measures its own device, and the one with the least memory decides."""

from pathlib import Path

import pytest

from components.startup import WrongSettings
from engine.build import assemble_led
from engine.device import huge_pages
from engine.ports import EngineRequest
from tests.engine.device.counted_memory import CountedMemory
from tests.engine.parallel.led import led
from tests.engine.parallel.measured_follower import BYTES
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, small

FOLLOWER = "tests.engine.parallel.measured_follower"
SMALL, LARGE = 14_000_000, 24_000_000


def test_the_smallest_number_of_pages_counts(
    tiny_dir: Path, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BYTES, str(SMALL))
    monkeypatch.setattr(huge_pages, "BLOCK_BYTES", 0)
    with led(tiny_dir, 2, module=FOLLOWER) as instance:
        config = small(tensor_parallel=2, num_pages=None, max_running=6, max_step_tokens=32)
        with CountedMemory(LARGE, instance.loaded) as memory:
            engine = assemble_led(instance.loaded, config, instance.followers, memory=memory)
            left = memory.look().free
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
