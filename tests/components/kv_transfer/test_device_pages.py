"""Reading and summing pages of a GPU, with a tensor in main memory."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from components.errors import Rejected
from components.kv_transfer import device_pages
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.device_pages import DevicePages
from components.kv_transfer.page_reader import HostPages, open_reader
from tests.components.kv_transfer.nixl_peer import LAYOUT, Pages

WANTED = [5, 0, 63, 7, 7]


def stand_in(pages: Pages) -> torch.Tensor:
    layout = pages.layout
    return torch.from_numpy(pages.memory).view(-1, layout.num_stripes, layout.page_size, layout.row_bytes)


@pytest.fixture
def pages() -> Pages:
    mine = Pages()
    mine.fill(3)
    return mine


@dataclass
class CountsCopies(DevicePages):
    """Records each copy."""

    pool: torch.Tensor
    batch_bytes: int
    copies: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        DevicePages.__init__(self, self.pool, self.batch_bytes)

    def _copy(self, pages: list[int]) -> torch.Tensor:  # type: ignore[override]
        self.copies.append(list(pages))
        return super()._copy(pages)


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_pages_come_in_order_and_each_copy_is_of_as_many_as_fit(pages: Pages, batch: int) -> None:
    reader = CountsCopies(stand_in(pages), batch * LAYOUT.page_bytes + 1)
    host = HostPages(pages)
    for read, expected in zip(reader.read(WANTED), host.read(WANTED), strict=True):
        np.testing.assert_array_equal(read, expected)
    assert reader.copies == [WANTED[i : i + batch] for i in range(0, len(WANTED), batch)]


def test_a_page_larger_than_a_batch_is_copied_alone(pages: Pages) -> None:
    reader = CountsCopies(stand_in(pages), 100)
    assert len(list(reader.read(WANTED))) == len(WANTED)
    assert reader.copies == [[page] for page in WANTED]


def test_no_pages_are_no_copy(pages: Pages) -> None:
    assert list(DevicePages(stand_in(pages)).read([])) == []


@pytest.mark.parametrize("peer_page_size", [4, 16, 64])
def test_a_pool_on_a_gpu_has_the_checksums_of_the_same_bytes_in_main_memory(
    pages: Pages, peer_page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the line that turns a GPU's address into a tensor is replaced."""
    monkeypatch.setattr(device_pages, "at", lambda region: stand_in(pages))
    sums = []
    for region in (pages, replace_device(pages, "cuda:0")):
        checksums = PageChecksums(region).of_transfer(peer_page_size)
        asyncio.run(checksums.add(WANTED, range(16, 70)))
        sums.append(asyncio.run(checksums.total()))
    assert sums[0] == sums[1]


def test_pages_that_no_process_can_read_are_refused() -> None:
    with pytest.raises(Rejected, match="these pages are on xpu:0"):
        open_reader(Pages(device="xpu:0"))


def replace_device(pages: Pages, device: str) -> Pages:
    other = replace(pages, device=device)
    other.memory = pages.memory
    return other


def test_a_thread_takes_the_pools_gpu_before_it_uses_a_stream(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned to GPU 0, so each process of another GPU had a context there too."""
    called: list[str] = []

    @contextmanager
    def stream(_stream: object) -> Iterator[None]:
        called.append("stream")
        yield

    reader: Any = DevicePages(stand_in(pages))
    reader._stream = SimpleNamespace(synchronize=lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(f"take {device}"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    assert len(list(reader.read(WANTED))) == len(WANTED)
    assert called == ["take cpu", "stream", "synchronize"]
