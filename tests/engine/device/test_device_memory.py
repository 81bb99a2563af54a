"""Shares of a device's memory, and how torch gets them."""

from functools import partial

import pytest
import torch

from engine.device.memory import CudaMemory, MemoryReading, MemoryUse

GB = 10**9
USE = MemoryUse(80 * GB, free=70 * GB, weights=8 * GB, compiled=GB, activations=2 * GB, graphs=GB)


def test_pages_get_what_the_share_leaves() -> None:
    assert USE.left(0.9) == (72 - 8 - 1 - 2 - 1) * GB
    assert USE.outside == GB


def test_what_other_processes_hold_is_left_to_them_and_a_fiftieth_stays_free() -> None:
    crowded = MemoryUse(80 * GB, free=10 * GB, weights=8 * GB, compiled=GB, activations=2 * GB, graphs=GB)
    assert crowded.outside == 61 * GB
    assert crowded.left(0.9) == round((10 - 2 - 1 - 1.6) * GB)
    assert "end other processes on this device" in crowded.shortage(6 * GB, 0.9)


def test_what_the_share_cannot_hold_is_not_blamed_on_other_processes() -> None:
    crowded = MemoryUse(80 * GB, free=10 * GB, weights=8 * GB, compiled=GB, activations=2 * GB, graphs=GB)
    assert crowded.by_others(0.9, 60 * GB)
    assert not crowded.by_others(0.9, 61 * GB)
    assert "raise engine.gpu_memory_utilization" in crowded.shortage(61 * GB, 0.9)
    assert not USE.by_others(0.9)
    assert not MemoryUse(80 * GB, 34 * GB, 8 * GB, 0, 0, 0).by_others(0.4), "the other worker's share is its own"


def test_two_workers_of_a_card_have_a_share_each() -> None:
    """The use of the other one, up to its share, has no effect."""
    assert MemoryUse(80 * GB, 70 * GB, 8 * GB, 0, 0, 0).left(0.45) == 28 * GB
    assert MemoryUse(80 * GB, 34 * GB, 8 * GB, 0, 0, 0).left(0.45) == 28 * GB


def test_a_shortage_names_what_is_missing_and_the_settings() -> None:
    said = USE.shortage(62 * GB, 0.9)
    assert "need 62.00 GB, 60.00 GB are left, so 2.00 GB are missing" in said
    assert "raise engine.gpu_memory_utilization, lower engine.max_step_tokens" in said
    assert "so 12.00 GB are missing" in USE.shortage(2 * GB, 0.025)


def test_torch_gives_back_cached_memory_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    calls: list[tuple[object, ...]] = []

    def answer(name: str, value: object, *args: object) -> object:
        calls.append((name, *args))
        return value

    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (5, 9),
        "memory_reserved": 3,
        "reset_peak_memory_stats": None,
        "max_memory_reserved": 4,
    }.items():
        monkeypatch.setattr(torch.cuda, name, partial(answer, name, value))
    memory = CudaMemory(device)
    assert memory.measure() == MemoryReading(total=9, free=5, own=3)
    assert calls[:2] == [("synchronize", device), ("empty_cache",)]
    memory.start_peak()
    assert memory.peak() == 4
    assert all(call[1:] in {(device,), ()} for call in calls)
