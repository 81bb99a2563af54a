"""A step over random pages, with its attention in float64, to check a backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from components.wire.layout import KvLayout
from engine.attention.backend import AttentionBackend, Scoring, StepShape
from engine.attention.step_tables import StepLimits
from engine.kv.storage import TORCH_DTYPES

TOLERANCE: Final = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # for outputs of about 1
LAYERS: Final = 3
LAYER: Final = 1  # its neighbours must stay unchanged
SPARE_PAGES: Final = 3
PLAIN: Final = Scoring(0.3)

Dtype = Literal["float32", "float16", "bfloat16"]
MakeBackend = Callable[..., AttentionBackend]  # takes pool, layout, query group, limits, and the dtype of queries


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """R requests, decodes first."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    scoring: Scoring = PLAIN
    dtype: Dtype = "float32"
    kv_heads: int = 2
    group: int = 3  # query heads that share a key head
    page_size: int = 16
    head_dim: int = 16
    sinks: bool = False
    eight_bits: bool = False  # pages hold 8-bit floats

    @property
    def layout(self) -> KvLayout:
        return KvLayout(
            model="random",
            dtype="fp8_e4m3" if self.eight_bits else self.dtype,
            page_size=self.page_size,
            layers=LAYERS,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def limits(self) -> StepLimits:
        return StepLimits(len(self.query_lens), sum(self.query_lens), max(self.context_lens))


class Outcome:
    def __init__(self, case: AttentionCase, make: MakeBackend, device: str = "cpu", seed: int = 0) -> None:
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(TORCH_DTYPES[case.dtype])

        self.case = case
        counts = [case.layout.pages_for(context) for context in case.context_lens]
        pages = sum(counts) + SPARE_PAGES
        shuffled = iter(torch.randperm(pages, generator=draw, device=device).tolist())
        self.tables = [[next(shuffled) for _ in range(count)] for count in counts]
        self.pool = normal(pages, case.kv_heads, LAYERS, 2, case.page_size, case.head_dim)
        self.pool = self.pool.to(TORCH_DTYPES[case.layout.dtype])
        self.before = self.pool.clone()
        total = sum(case.query_lens)
        # transformers' strides: tokens outermost
        self.query = normal(1, total, case.kv_heads * case.group, case.head_dim).transpose(1, 2)
        self.key, self.value = (normal(1, total, case.kv_heads, case.head_dim).transpose(1, 2) for _ in range(2))
        self.sinks = normal(case.kv_heads * case.group) * 3 if case.sinks else None
        self.backend = make(self.pool, case.layout, case.group, case.limits, dtype=self.query.dtype)
        step = self.backend.plan(StepShape(case.query_lens, case.context_lens, self.tables))
        self.out = step.attend(LAYER, self.query, self.key, self.value, case.scoring, sinks=self.sinks)

    def check(self) -> float:
        """Return the largest error. Raises: AssertionError, if it is too large or the pool is wrong."""
        first, worst = 0, 0.0
        before = self.before.to(self.query.dtype)
        after = before.clone()
        for length, context, table in zip(self.case.query_lens, self.case.context_lens, self.tables, strict=True):
            new = slice(first, first + length)
            stood = _in_order(before, table)
            kv = torch.stack([self.key[0, :, new], self.value[0, :, new]]).to(self.pool.dtype).to(before.dtype)
            keys, values = torch.cat([stood[:, :, : context - length], kv], 2)
            expected = written_out(self.query[0, :, new], keys, values, self.case.scoring, self.sinks)
            error = (self.out[0, new].double() - expected).abs().max().item()
            assert error < TOLERANCE[self.case.dtype], f"{self.case}: off by {error}"  # so is NaN
            worst = max(worst, error)
            for i, position in enumerate(range(context - length, context)):
                page, offset = table[position // self.case.page_size], position % self.case.page_size
                after[page, :, LAYER, :, offset] = kv[:, :, i].transpose(0, 1)
            first += length
        assert torch.equal(self.pool.to(after.dtype), after), f"{self.case}: the pool was changed outside the new slots"
        return worst


def written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention as float64 [T, heads, D], of the last T queries [heads, T, D] over KV [kv_heads, S, D].

    Query q sees key k if 0 <= q - k and, with a window, q - k < window.
    """
    group = len(query) // len(keys)
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * scoring.scaling
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    length, context = scores.shape[1:]
    positions = torch.arange(context, device=query.device)
    back = positions[context - length :, None] - positions
    seen = (back >= 0) & (back < scoring.window) if scoring.window else back >= 0
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, length, 1)], -1)
    return (scores.softmax(-1)[..., :context] @ values).transpose(0, 1)


def _in_order(pool: torch.Tensor, table: list[int]) -> Any:
    """Return a request's pages in order, [2, kv_heads, S, D]."""
    return pool[table, :, LAYER].permute(2, 1, 0, 3, 4).flatten(2, 3)
