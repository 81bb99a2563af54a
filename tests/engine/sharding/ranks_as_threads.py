"""Ranks as threads of this process, for computations without an engine."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from tests.waiting import PATIENCE_S

T = TypeVar("T")


class Ranks:
    """Replaces torch's process group."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size
        self._own = threading.local()
        monkeypatch.setattr("torch.distributed.all_reduce", self._all_reduce)

    def run(self, compute: Callable[[int], T]) -> list[T]:
        """Call `compute(rank)` for all ranks at once."""

        def of_rank(rank: int) -> T:
            self._own.rank = rank
            try:
                return compute(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(of_rank, range(self._size)))

    def _all_reduce(self, y: torch.Tensor) -> None:
        assert y.is_contiguous(), "as gloo and NCCL need it"
        self._values[self._own.rank] = y.clone()
        self._barrier.wait(PATIENCE_S)
        y.copy_(torch.stack(self._values).sum(dim=0))
        self._barrier.wait(PATIENCE_S)
