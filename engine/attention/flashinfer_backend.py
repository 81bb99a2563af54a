"""The backend `flashinfer`. Only tests with a stand-in have run it.

The kernels accept any strides that keys and values share (flashinfer 0.6, layout "HND").
Plans are made on the host, so graphs cannot record decodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import flashinfer
import numpy as np
import torch
from torch import Tensor

from components.wire.layout import KvLayout
from engine.attention.backend import Scoring, StepShape
from engine.attention.choose_attention import AttentionUnavailable
from engine.attention.step_tables import PageRows, StepLimits, count_decodes
from engine.device.copies import to_device
from engine.errors import UnsupportedModel

WORKSPACE_BYTES: Final = 128 * 1024 * 1024  # as its documentation recommends
HEAD_DIMS: Final = (64, 128, 256)
TENSOR_CORE_GROUP: Final = 4  # query heads per key head that make tensor cores pay


@dataclass(frozen=True, slots=True)
class Span:
    """Requests that one wrapper computes; int32 tensors on the host."""

    tokens: slice
    query_starts: Tensor  # [R + 1], from the span's first token
    page_starts: Tensor  # [R + 1]
    pages: Tensor
    last_page_lens: Tensor  # [R]
    decodes: bool


class FlashInferAttention:
    def __init__(
        self, pool: Tensor, layout: KvLayout, query_group: int, _limits: StepLimits, *, dtype: torch.dtype | None = None
    ) -> None:
        """Raises: AttentionUnavailable, if the kernels do not support the model."""
        if pool.dtype == torch.float32 or dtype not in (None, pool.dtype) or layout.head_dim not in HEAD_DIMS:
            raise AttentionUnavailable(
                f"attention=flashinfer computes in 16 bits with head dimensions of {', '.join(map(str, HEAD_DIMS))}; "
                f"{layout.model} has {layout.dtype} and {layout.head_dim}: try attention=triton"
            )
        self.pool = pool
        self.layout = layout
        self.query_group = query_group
        self._rows = PageRows(layout.page_size)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrappers: dict[tuple[bool, Scoring, int], Any] = {}
        self._turn = 0

    def plan(self, shape: StepShape) -> "FlashInferStep":
        """Leave the wrappers to `attend`, where a layer's scoring is known.

        A wrapper's plan fills its pinned memory, which the device reads later. The step before may still be running, so
        steps use two sets of wrappers by turns.
        """
        self._turn = 1 - self._turn
        arrays = self._rows.take(shape)
        num_decodes = count_decodes(shape.query_lens)
        starts = [0, num_decodes, len(shape.query_lens)]
        spans = [
            self._span(shape, arrays, first, last, decodes=last == num_decodes)
            for first, last in pairwise(starts)
            if first < last
        ]
        return FlashInferStep(self, shape, spans, self._turn)

    def wrapper(self, decodes: bool, scoring: Scoring, turn: int) -> Any:
        key = (decodes, scoring, turn)
        if key not in self._wrappers:
            if decodes:
                made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "HND", use_tensor_cores=self.query_group >= TENSOR_CORE_GROUP
                )
            else:
                made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._wrappers[key] = made
        return self._wrappers[key]

    def _span(self, shape: StepShape, arrays: Sequence[Any], first: int, last: int, *, decodes: bool) -> Span:
        before = sum(shape.query_lens[:first])
        query_starts = np.cumsum([0, *shape.query_lens[first:last]])
        contexts = np.array(shape.context_lens[first:last])
        return Span(
            tokens=slice(before, before + int(query_starts[-1])),
            query_starts=_int32(query_starts),
            page_starts=_int32(np.cumsum([0, *map(len, arrays[first:last])])),
            pages=_int32(np.concatenate(arrays[first:last])),
            last_page_lens=_int32((contexts - 1) % self.layout.page_size + 1),
            decodes=decodes,
        )


class FlashInferStep:
    def __init__(self, backend: FlashInferAttention, shape: StepShape, spans: list[Span], turn: int) -> None:
        self._backend = backend
        self._turn = turn
        self._spans = spans
        self._planned: set[tuple[bool, Scoring]] = set()
        device = backend.pool.device
        lengths = np.array(shape.query_lens)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.cumsum(lengths)
        positions = np.arange(len(owners)) - (ends - np.array(shape.context_lens))[owners]
        counts = np.concatenate([np.diff(span.page_starts) for span in spans])
        # of the new keys and values
        self._slots = [
            to_device(tensor, device)
            for tensor in (
                _int32(owners),
                _int32(positions),
                torch.cat([span.pages for span in spans]),
                _int32(np.cumsum([0, *counts])),
                torch.cat([span.last_page_lens for span in spans]),
            )
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        if sinks is not None:
            raise UnsupportedModel("attention=flashinfer computes no attention sinks: try attention=triton")
        owners, positions, pages, page_starts, last_page_lens = self._slots
        kv = self._backend.pool[:, :, layer, 0], self._backend.pool[:, :, layer, 1]
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
        flashinfer.append_paged_kv_cache(
            keys, values, owners, positions, kv, pages, page_starts, last_page_lens, kv_layout="HND"
        )
        outputs = [self._run(span, queries[span.tokens].contiguous(), kv, scoring) for span in self._spans]
        return torch.cat(outputs)[None]

    def _run(self, span: Span, queries: Tensor, kv: tuple[Tensor, Tensor], scoring: Scoring) -> Tensor:
        wrapper = self._backend.wrapper(span.decodes, scoring, self._turn)
        if (span.decodes, scoring) not in self._planned:
            layout = self._backend.layout
            heads = layout.num_heads * self._backend.query_group
            tables = span.page_starts, span.pages, span.last_page_lens
            sizes = heads, layout.num_heads, layout.head_dim, layout.page_size
            options = {
                "sm_scale": scoring.scaling,
                "window_left": scoring.window - 1,  # excludes the query's own key; -1: no window
                "logits_soft_cap": scoring.softcap,
                "q_data_type": queries.dtype,
                "kv_data_type": queries.dtype,
            }
            if span.decodes:
                wrapper.plan(*tables, *sizes, **options)
            else:
                wrapper.plan(span.query_starts, *tables, *sizes, causal=True, **options)
            self._planned.add((span.decodes, scoring))
        attended: Tensor = wrapper.run(queries, kv)
        return attended


def _int32(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))
