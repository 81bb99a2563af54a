"""Pages move between a device and main memory."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.config import EngineConfig
from engine.kv.count import count_offloaded
from engine.kv.offload_memory import PageCopies, allocate_offloaded
from engine.kv.storage import allocate_storage
from tests.engine.simulated.simulated_cuda import simulated_cuda
from tests.engine.simulated.simulated_device import SimulatedDevice

LAYOUT = KvLayout(model="m", dtype="bfloat16", page_size=16, layers=3, kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[SimulatedDevice]:
    if torch.version.cuda is not None:
        pytest.skip("for a torch without CUDA")
    with simulated_cuda() as simulated:
        yield simulated


def test_memory_is_counted_in_whole_pages() -> None:
    assert count_offloaded(EngineConfig(), LAYOUT) == 0
    assert count_offloaded(EngineConfig(kv_offload_gb=3.9 * LAYOUT.page_bytes / 1e9), LAYOUT) == 3
    assert count_offloaded(EngineConfig(kv_offload_gb=0.0), LAYOUT) == count_offloaded(EngineConfig(), LAYOUT) == 0
    with pytest.raises(WrongSettings, match=f"1e-06 GB is less than one page, {LAYOUT.page_bytes} bytes"):
        count_offloaded(EngineConfig(kv_offload_gb=1e-6), LAYOUT)


def test_absurd_sizes_are_refused_as_any_that_do_not_fit() -> None:
    """They were overflows of numbers."""
    pages = count_offloaded(EngineConfig(kv_offload_gb=1e300), LAYOUT)
    with pytest.raises(WrongSettings, match="are free"):
        allocate_offloaded(LAYOUT, pages, CPU)


def check_moves(device: torch.device) -> None:
    storage = allocate_storage(LAYOUT, 4, device)
    offloaded = allocate_offloaded(LAYOUT, 3, device)
    copies = PageCopies(storage, offloaded)
    for page in range(4):
        storage[page].fill_(page + 1)
    copies.copy([(0, 4), (1, 6)])  # out
    assert [contents(offloaded[0]), contents(offloaded[2])] == [1, 2]
    storage[:2].zero_()
    copies.copy([(6, 0), (4, 1), (3, 2)])  # back, and within the pool
    assert [contents(storage[page]) for page in range(4)] == [2, 1, 4, 4]


def contents(page: torch.Tensor) -> float:
    """The one value of a page."""
    assert page.min() == page.max()
    return float(page.min())


def test_pages_come_back_whole() -> None:
    check_moves(CPU)


def test_pages_of_a_device_come_back_whole(gpu: SimulatedDevice) -> None:
    check_moves(torch.device("cuda:0"))


def test_main_memory_is_locked_for_a_device_until_it_is_free(gpu: SimulatedDevice) -> None:
    pages = allocate_offloaded(LAYOUT, 3, torch.device("cuda:0"))
    assert gpu.registered == {pages.data_ptr()}
    del pages
    assert gpu.registered == set()


def test_copies_of_several_pages_wait_once(gpu: SimulatedDevice) -> None:
    device = torch.device("cuda:0")
    copies = PageCopies(allocate_storage(LAYOUT, 4, device), allocate_offloaded(LAYOUT, 4, device))
    gpu.waits.clear()
    copies.copy([(page, page + 4) for page in range(4)])
    assert gpu.waits == ["synchronize"]


def test_memory_that_cuda_cannot_lock_is_refused(gpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(WrongSettings, match="kv_offload_gb: CUDA cannot lock"):
        allocate_offloaded(LAYOUT, 4, torch.device("cuda:0"))


def test_too_little_main_memory_is_refused_before_it_is_used() -> None:
    with pytest.raises(WrongSettings, match="kv_offload_gb: evicted KV pages need"):
        allocate_offloaded(LAYOUT, 2**60 // LAYOUT.page_bytes, CPU)
