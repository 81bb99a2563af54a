from typing import Any

import pytest

from engine.config import EngineConfig


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_size": 20}, "page_size is 20; it must be one of 16, 32, 64, 128"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"kv_memory_gb": -1.0}, "kv_memory_gb is -1"),
        ({"max_running": 0}, "max_running is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"max_context": -5}, "max_context is -5"),
        ({"reserve_tokens": -1}, "reserve_tokens is -1"),
        ({"itl_target_ms": -1}, "itl_target_ms is -1.0; it must be from 0"),
        ({"itl_target_ms": 1e300}, r"it must be from 0 \(no limit\) to 60000"),
        ({"max_running": 64, "max_step_tokens": 64}, "a prompt chunk needs three tokens"),
        ({"itl_target_ms": float("inf")}, "itl_target_ms is inf; it must be a finite number"),
        ({"kv_memory_gb": float("nan")}, "kv_memory_gb is nan; it must be a finite number"),
        ({"compile_timeout_s": 1e10}, "compile_timeout_s is 10000000000.0; it must be at most"),
        ({"device": "gpu"}, "device\n.*'gpu' is not a device: give auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "'cuda:' is not a device"),
        ({"speculative_tokens": -1}, "greater than or equal to 0"),
        ({"speculative_tokens": 4, "pipeline": "on"}, "speculative_tokens needs pipeline=auto or off"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**changes)


def test_the_defaults_are_valid() -> None:
    assert EngineConfig().page_size == 16
