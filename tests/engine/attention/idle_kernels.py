"""Triton attention that computes nothing, for tests of what is recorded and allocated: the interpreter takes seconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self
from unittest import mock

from engine.attention import triton_backend, triton_kernels


class _Idle:
    OPERANDS = triton_kernels.OPERANDS

    def __getattr__(self, _kernel: str) -> Self:
        return self

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_args, **_options: None


@contextmanager
def idle_kernels() -> Iterator[None]:
    with mock.patch.object(triton_backend, "kernels", _Idle()):
        yield
