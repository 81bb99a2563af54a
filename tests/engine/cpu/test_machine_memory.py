from pathlib import Path

import pytest
import torch

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.cpu import machine_memory
from engine.cpu.machine_memory import available_bytes
from engine.kv.storage import allocate_storage
from engine.mock.marked_pages import MarkedPages

LAYOUT = KvLayout(model="m", dtype="float32", page_size=16, layers=30, kv_heads=3, head_dim=64)


def test_a_container_has_what_is_left_of_its_limit_and_the_files_that_it_has_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000000\n")
    assert available_bytes(tmp_path, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("7000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert available_bytes(tmp_path, tmp_path) == 3_000_000
    assert available_bytes(tmp_path / "no", tmp_path / "no") is None


def test_a_pool_larger_than_what_is_free_is_refused_before_it_is_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 1_000_000_000)
    with pytest.raises(
        WrongSettings, match=r"kv_memory_gb .* KV pages need 1.5 GB, but only 1.0 GB of memory are free here"
    ):
        allocate_storage(LAYOUT, 1_500_000_000 // LAYOUT.page_bytes + 1, torch.device("cpu"))


@pytest.mark.parametrize("num_pages", [2**40, 2**60])
def test_a_mock_s_pool_that_the_kernel_does_not_give_is_refused(num_pages: int) -> None:
    with pytest.raises(WrongSettings, match="no memory for KV pages of"):
        MarkedPages(LAYOUT, num_pages)
