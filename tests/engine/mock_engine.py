"""Mock engines for tests: no torch, no waiting, and quick enough for thousands of steps."""

from pathlib import Path
from typing import Any

from engine.config import EngineConfig, MockConfig
from engine.core.engine_core import EngineCore
from engine.mock.mock_engine import build_engine
from tests.engine.tiny_engine import PIPELINE

AT_ONCE = float("inf")


def make_mock(home: Path, mock: dict[str, Any] | None = None, model: str = "mock", **changes: Any) -> EngineCore:
    settings: dict[str, Any] = {
        **PIPELINE,
        "num_pages": 64,
        "max_running": 16,
        "max_step_tokens": 48,
        "reserve_tokens": 16,
        "mock": MockConfig(**{"speedup": AT_ONCE, "layers": 1, "kv_heads": 1, "head_dim": 8, **(mock or {})}),
    }
    return build_engine(model, EngineConfig(**{**settings, **changes}), home)
