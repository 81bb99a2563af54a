import gc

import pytest

from components.process import GC_THRESHOLDS, run, settle


def test_a_service_collects_garbage_seldom_and_never_what_its_start_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.process.end_process", lambda: None)
    before, seen = gc.get_threshold(), []

    async def main() -> None:
        settle()
        seen.append((gc.get_threshold(), gc.get_freeze_count()))

    try:
        run(main())
        [(thresholds, frozen)] = seen
        assert thresholds == GC_THRESHOLDS
        assert frozen > 10_000
    finally:
        gc.set_threshold(*before)
