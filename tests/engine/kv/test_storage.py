import pytest
import torch

from components.startup import CannotServe, WrongSettings
from components.wire.layout import KvLayout
from engine.config import EngineConfig
from engine.kv.count import count_pages
from engine.kv.storage import allocate_storage, check_allocator

LAYOUT = KvLayout(model="m", dtype="bfloat16", page_size=16, layers=30, kv_heads=3, head_dim=64)


def test_memory_is_counted_in_whole_pages() -> None:
    assert LAYOUT.page_bytes == 368_640
    assert count_pages(EngineConfig(kv_memory_gb=1.0), LAYOUT) == 2712
    assert count_pages(EngineConfig(num_pages=7), LAYOUT) == 7


def test_too_little_memory_for_a_page_says_how_much_one_needs() -> None:
    with pytest.raises(WrongSettings, match="less than one page, 368640 bytes"):
        count_pages(EngineConfig(kv_memory_gb=0.0001), LAYOUT)


def test_a_page_is_one_contiguous_piece() -> None:
    storage = allocate_storage(LAYOUT, 3, torch.device("cpu"))
    assert storage[1].is_contiguous()
    assert storage[1].nbytes == LAYOUT.page_bytes
    assert storage[1].data_ptr() - storage.data_ptr() == LAYOUT.page_bytes
    assert not storage.any()


@pytest.mark.parametrize(("total", "kind"), [(3_000_000, CannotServe), (2_000_000, WrongSettings)])
def test_pages_that_would_fit_on_the_device_alone_may_fit_later(
    total: int, kind: type[CannotServe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes' memory counted as wrong settings."""

    def refuse(*_args: object, **_options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000_000)
    with pytest.raises(CannotServe, match="KV pages take") as raised:
        allocate_storage(LAYOUT, 3, torch.device("cuda"))
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync"),
    ],
)
def test_an_allocator_whose_memory_peers_cannot_map_is_refused(name: str, value: str) -> None:
    with pytest.raises(WrongSettings, match=f"{name}={value}: peers cannot map KV pages"):
        check_allocator({name: value})
    check_allocator({name: "max_split_size_mb:64,expandable_segments:False"})
    check_allocator({})
