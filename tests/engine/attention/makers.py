"""Backends as `bench.attention_case` makes them."""

from typing import Any

import torch

from components.wire.layout import KvLayout
from engine.attention.cpu import CpuAttention
from engine.attention.plain import PlainAttention


def make_plain(pool: torch.Tensor, layout: KvLayout, group: int, _limits: Any, *, dtype: torch.dtype) -> PlainAttention:
    return PlainAttention(pool, layout, group, dtype)


def make_cpu(pool: torch.Tensor, layout: KvLayout, _group: int, _limits: Any, *, dtype: torch.dtype) -> CpuAttention:
    assert pool.dtype in (dtype, torch.float8_e4m3fn)
    return CpuAttention(pool, layout)
