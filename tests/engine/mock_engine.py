"""Mock engines for tests, quick enough for thousands of steps."""

import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, MockConfig
from engine.core.engine_core import EngineCore
from engine.mock.mock_engine import build_engine
from tests.engine.tiny_engine import PIPELINE

AT_ONCE = float("inf")


class HeldDevice:
    """The clock of simulated devices. Only a test moves it, so steps take as long as the test needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1.0
        self.is_busy = False  # whether a step has ever been launched
        monkeypatch.setattr("engine.mock.mock_runner.time", self)

    def perf_counter(self) -> float:
        self.is_busy = True
        return self.now_s

    def finish(self) -> None:
        """End all steps in flight; the engine notices after its pause."""
        self.now_s += 100.0

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(seconds)


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
