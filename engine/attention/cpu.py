"""Attention on the CPU: a C++ operator that reads pages in place.

The step is a tensor argument, so a compiled package calls the operator without Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from components.wire.layout import KvLayout
from engine.attention.backend import Scoring, StepShape


class CpuAttention:
    """Needs the kernel of `engine.kernels.native_library`."""

    def __init__(self, pool: Tensor, layout: KvLayout) -> None:
        self._pool = pool
        self._layout = layout

    def plan(self, shape: StepShape) -> "CpuStep":
        pages = [self._layout.pages_for(context) for context in shape.context_lens]
        return CpuStep(self._pool, pack_plan(shape.query_lens, shape.context_lens, shape.block_tables, max(pages)))


@dataclass(frozen=True, slots=True)
class CpuStep:
    pool: Tensor
    plan: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Rows beyond the plan's tokens are zero, and write no KV."""
        options = scoring.scaling, scoring.window, scoring.softcap, None if sinks is None else sinks.float()
        attended: Tensor = torch.ops.kvmesh.attend_pages(query, key, value, self.pool, self.plan, layer, *options)
        return attended


def pack_plan(
    query_lens: Sequence[int], context_lens: Sequence[int], block_tables: Sequence[Sequence[int]], table_len: int
) -> Tensor:
    """Return int32 [2 + R + 1 + R + R * table_len]: R, table_len, first token of each request and the end, contexts, tables."""
    count = len(query_lens)
    plan = np.zeros(3 + count * (2 + table_len), dtype=np.int32)
    plan[:2] = count, table_len
    np.cumsum(query_lens, out=plan[3 : 3 + count])
    plan[3 + count : 3 + 2 * count] = context_lens
    tables = plan[3 + 2 * count :].reshape(count, table_len)
    for row, table in zip(tables, block_tables, strict=True):
        used = table[:table_len]
        row[: len(used)] = used
    return torch.from_numpy(plan)
