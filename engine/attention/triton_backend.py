"""The backend `triton`: plans steps and launches `triton_kernels`."""

from dataclasses import dataclass
from typing import Final

import torch

from components.wire.layout import KvLayout
from engine.attention import triton_kernels as kernels
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import SMALLEST_BLOCK, PromptBlocks, StepLimits, StepTables, count_decodes

PROGRAMS_PER_PROCESSOR: Final = 4  # for decodes; some hide others' memory latency
MAX_SPLITS: Final = 64
MIN_TILE: Final = 16  # minimum of tl.dot


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block shapes, compared by `bench.gpu --part tune`."""

    decode_n: int  # keys per iteration
    decode_warps: int
    decode_stages: int  # blocks of keys in flight
    prompt_m: int  # queries in a long chunk's block
    prompt_n: int
    prompt_warps: int
    prompt_stages: int


def choose_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        if head_dim <= 64:
            return Tiles(32, 4, 2, 32, 32, 4, 2)
        return Tiles(32, 8, 2, 16, 16, 4, 2) if head_dim <= 128 else Tiles(16, 8, 2, 16, 16, 8, 2)
    return Tiles(64, 4, 5, 128, 64, 8, 3) if head_dim <= 128 else Tiles(32, 4, 4, 128, 32, 8, 3)


class TritonAttention:
    def __init__(
        self,
        pool: torch.Tensor,
        layout: KvLayout,
        query_group: int,
        limits: StepLimits,
        *,
        tiles: Tiles | None = None,
        programs: int | None = None,
    ) -> None:
        """Split decodes into `programs`, by default a few for each processor."""
        self._pool = pool
        self._layout = layout
        self._tables = StepTables(limits, layout.page_size, pool.device)
        self._tiles = tiles or choose_tiles(layout.head_dim, pool.dtype)
        self._programs = programs or PROGRAMS_PER_PROCESSOR * _processors(pool.device)
        block_d = max(MIN_TILE, 1 << (layout.head_dim - 1).bit_length())
        self._block_h = max(MIN_TILE, 1 << (query_group - 1).bit_length())
        self._shapes = {
            "KV_HEADS": layout.num_heads,
            "LAYERS": layout.layers,
            "PAGE": layout.page_size,
            "HEAD_DIM": layout.head_dim,
            "BLOCK_D": block_d,
        }
        # no tf32 for float32, so that greedy ids equal other backends'
        self._scores = {
            "GROUP": query_group,
            "PRECISION": "ieee" if pool.dtype == torch.float32 else "tf32",
            "OPERANDS": kernels.OPERANDS[pool.dtype] if pool.device.type == "cuda" else kernels.OPERANDS[torch.float32],
        }

    @property
    def limits(self) -> StepLimits:
        return self._tables.limits

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def plan(self, shape: StepShape) -> "TritonStep":
        num_decodes = count_decodes(shape.query_lens)
        prompts = shape.query_lens[num_decodes:]
        blocks = self._tables.fill(shape, num_decodes, self._block_m(max(prompts, default=0)))
        longest = max(shape.context_lens[:num_decodes], default=0)
        return TritonStep(self, num_decodes, self._splits(num_decodes, longest), blocks if prompts else None)

    def recorded(self, rows: int) -> "TritonStep":
        return TritonStep(self, rows, self._splits(rows, self.limits.context), None)

    def decode(
        self,
        step: "TritonStep",
        layer: int,
        out: torch.Tensor,
        new: tuple[torch.Tensor, ...],
        scoring: Scoring,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attend and write KV; `new` is query, key, value [heads, T, D]."""
        rows, splits = step.num_decodes, step.splits
        query, key, value = new
        heads, head_dim = query.shape[0], self._layout.head_dim
        logs = partial = out
        if splits > 1:
            partial = torch.empty(rows * heads * splits * head_dim, dtype=torch.float32, device=out.device)
            logs = torch.empty(rows * heads * splits, dtype=torch.float32, device=out.device)
        tables, tiles = self._tables, self._tiles
        kernels.decode_kernel[rows, self._layout.num_heads, splits](
            out, partial, logs, query, key, value, self._pool, out if sinks is None else sinks,
            tables.context_lens, tables.table_starts, tables.pages,
            layer, scoring.scaling, scoring.softcap, scoring.window, *_strides(query, key, value),
            BLOCK_H=self._block_h, BLOCK_N=tiles.decode_n, STAGES=tiles.decode_stages, SPLIT=splits > 1,
            **self._shapes, **self._scores, **_kinds(scoring, sinks),
            num_warps=tiles.decode_warps,
        )  # fmt: skip
        if splits > 1:
            kernels.join_kernel[(rows * heads,)](
                out, partial, logs, HEAD_DIM=head_dim, BLOCK_D=self._shapes["BLOCK_D"], SPLITS=splits, num_warps=2
            )

    def prompt(
        self,
        step: "TritonStep",
        layer: int,
        out: torch.Tensor,
        new: tuple[torch.Tensor, ...],
        scoring: Scoring,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        query, key, value = new
        blocks, tables, tiles = step.prompts, self._tables, self._tiles
        assert blocks is not None
        tensors = (
            self._pool, tables.context_lens, tables.table_starts,
            blocks.query_starts, tables.pages, blocks.requests, blocks.firsts,
        )  # fmt: skip
        kernels.write_kernel[self._layout.num_heads, blocks.count](
            key, value, *tensors, layer, step.num_decodes, *_strides(key, value), BLOCK_M=blocks.block_m, **self._shapes
        )
        long = blocks.block_m == tiles.prompt_m
        kernels.prompt_kernel[query.shape[0], blocks.count](
            out, query, out if sinks is None else sinks, *tensors, layer, step.num_decodes,
            scoring.scaling, scoring.softcap, scoring.window, *_strides(query),
            BLOCK_M=blocks.block_m, BLOCK_N=tiles.prompt_n, STAGES=tiles.prompt_stages,
            **self._shapes, **self._scores, **_kinds(scoring, sinks),
            num_warps=tiles.prompt_warps if long else 4,
        )  # fmt: skip

    def _block_m(self, longest: int) -> int:
        """One of two sizes, because each is compiled."""
        return SMALLEST_BLOCK if longest <= SMALLEST_BLOCK else self._tiles.prompt_m

    def _splits(self, rows: int, context: int) -> int:
        """A power of two, because each is compiled."""
        fill = self._programs // max(1, rows * self._layout.num_heads)
        useful = -(-context // self._tiles.decode_n)
        return 1 << max(0, min(fill, useful, MAX_SPLITS).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class TritonStep:
    """Valid until the next plan overwrites the tables."""

    backend: TritonAttention
    num_decodes: int
    splits: int  # of a decode's context
    prompts: PromptBlocks | None

    @property
    def decodes_only(self) -> bool:
        return self.prompts is None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, tokens, head_dim = query.shape[1:]
        new = tuple(x[0] if x.stride(3) == 1 else x[0].contiguous() for x in (query, key, value))
        out = query.new_empty(1, tokens, heads, head_dim)
        if self.num_decodes:
            self.backend.decode(self, layer, out, new, scoring, sinks=sinks)
        if self.prompts is not None:
            self.backend.prompt(self, layer, out, new, scoring, sinks=sinks)
        return out


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _kinds(scoring: Scoring, sinks: torch.Tensor | None) -> dict[str, bool]:
    return {"WINDOWED": scoring.window > 0, "CAPPED": scoring.softcap > 0, "SINKS": sinks is not None}
