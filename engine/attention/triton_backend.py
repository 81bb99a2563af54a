"""The backend `triton`: plans steps and launches `triton_kernels`."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from components.wire.layout import KvLayout
from engine.attention import triton_kernels as kernels
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import (
    SHORT_CHUNK,
    SPAN,
    Blocks,
    Filled,
    QueryBlocks,
    StepLimits,
    StepTables,
    count_decodes,
)

PROGRAMS_PER_PROCESSOR: Final = 8  # of a decode launch; several hide each other's memory latency
PARTIAL_BYTES: Final = 256 * 2**20  # for the partial results of a prompt launch
SHARING: Final = 4  # contexts of a recorded step together, in the pool's tokens, for which graphs have memory
JOINED: Final = 16  # spans that a join kernel adds at a time
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
        pool: Tensor,
        layout: KvLayout,
        query_group: int,
        limits: StepLimits,
        *,
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
        programs: int | None = None,
        span: int = SPAN,
    ) -> None:
        """`dtype`: of queries, by default the pool's. `programs`: most concurrent decode programs; by default several
        per processor.
        """
        dtype = dtype or pool.dtype
        self._pool = pool
        self._layout = layout
        self._tiles = tiles or choose_tiles(layout.head_dim, dtype)
        assert span % self._tiles.prompt_n == 0, "blocks of keys do not cross spans"
        self._lanes = max(1, (programs or PROGRAMS_PER_PROCESSOR * _processors(pool.device)) // layout.num_heads)
        self._heads = layout.num_heads * query_group
        longest = max(self._tiles.prompt_m, _power_of_two(query_group))
        self._block_rows = sorted({min(longest, max(MIN_TILE, _power_of_two(SHORT_CHUNK * query_group))), longest})
        partial_bytes = longest * layout.num_heads * layout.head_dim * 4
        blocks = Blocks(
            [rows // query_group for rows in self._block_rows], span, max(1, PARTIAL_BYTES // partial_bytes)
        )
        self._tables = StepTables(limits, layout.page_size, pool.device, blocks)
        self._shapes = {
            "KV_HEADS": layout.num_heads,
            "LAYERS": layout.layers,
            "PAGE": layout.page_size,
            "HEAD_DIM": layout.head_dim,
            "BLOCK_D": max(MIN_TILE, _power_of_two(layout.head_dim)),
        }
        # no tf32 for float32, so that greedy ids equal other backends'
        self._scores = {
            "GROUP": query_group,
            "SPAN": span,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "OPERANDS": kernels.OPERANDS[dtype] if pool.device.type == "cuda" else kernels.OPERANDS[torch.float32],
        }
        self._join_shapes = {name: self._shapes[name] for name in ("KV_HEADS", "HEAD_DIM", "BLOCK_D")}
        self._join_shapes |= {"GROUP": query_group, "SPAN": span, "BLOCK_S": JOINED}

    @property
    def limits(self) -> StepLimits:
        return self._tables.limits

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def plan(self, shape: StepShape) -> "TritonStep":
        rows = count_decodes(shape.query_lens)
        filled = self._tables.fill(shape, rows)
        replayable = not filled.prompts and filled.pieces <= self._recorded_pieces(rows)
        return TritonStep(self, rows, filled.pieces, filled, joins=filled.pieces > rows, replayable=replayable)

    def recorded(self, rows: int) -> "TritonStep":
        return TritonStep(self, rows, self._recorded_pieces(rows), None, joins=True, replayable=True)

    def decode(
        self,
        step: "TritonStep",
        layer: int,
        out: Tensor,
        new: tuple[Tensor, ...],
        scoring: Scoring,
        *,
        sinks: Tensor,
    ) -> None:
        """Attend and write KV; `new` is query, key, value [heads, T, D]."""
        partial = self._partials(out, step.pieces * self._heads if step.joins else 0)
        tables, tiles = self._tables, self._tiles
        group = self._heads // self._layout.num_heads
        kernels.decode_kernel[self._layout.num_heads, min(step.pieces, self._lanes)](
            out, *partial, *new, self._pool, sinks,
            tables.header, tables.context_lens, tables.table_starts, tables.slots, tables.pages,
            layer, scoring.scaling, scoring.softcap, scoring.window, *_strides(*new),
            BLOCK_H=max(MIN_TILE, _power_of_two(group)), BLOCK_N=tiles.decode_n, STAGES=tiles.decode_stages,
            **self._shapes, **self._scores, **_kinds(scoring, sinks, out),
            num_warps=tiles.decode_warps,
        )  # fmt: skip
        if step.joins:
            kernels.join_kernel[self._heads, step.num_decodes](
                out, *partial, sinks, tables.context_lens, tables.slots, *(tables.slots,) * 4,
                ROWS=group, DECODES=True, SINKS=sinks is not out, **self._join_shapes,
            )  # fmt: skip

    def prompt(
        self,
        step: "TritonStep",
        layer: int,
        out: Tensor,
        new: tuple[Tensor, ...],
        scoring: Scoring,
        *,
        sinks: Tensor,
    ) -> None:
        query, key, value = new
        assert step.filled is not None
        tables, kv_heads, starts = self._tables, self._layout.num_heads, step.filled.query_starts
        context = tables.context_lens, tables.table_starts, starts, tables.pages
        for blocks in step.filled.prompts:
            tokens = tables.blocks.tokens[blocks.size]
            kernels.write_kernel[kv_heads, len(blocks.requests)](
                key, value, self._pool, *context, blocks.requests, blocks.firsts, layer, step.num_decodes,
                *_strides(key, value), BLOCK_T=_power_of_two(tokens), TOKENS=tokens, **self._shapes,
            )  # fmt: skip
        for blocks in step.filled.prompts:
            rows = self._block_rows[blocks.size]
            partial = self._partials(out, blocks.partials * kv_heads * rows)
            kernels.prompt_kernel[kv_heads, len(blocks.piece_blocks)](
                out, *partial, query, sinks, self._pool, *context, *_tables(blocks), layer, step.num_decodes,
                scoring.scaling, scoring.softcap, scoring.window, *_strides(query),
                BLOCK_M=rows, TOKENS=tables.blocks.tokens[blocks.size],
                BLOCK_N=self._tiles.prompt_n, STAGES=self._tiles.prompt_stages,
                **self._shapes, **self._scores, **_kinds(scoring, sinks, out),
                num_warps=self._tiles.prompt_warps if rows == self._block_rows[-1] else 4,
            )  # fmt: skip
            if blocks.split:
                kernels.join_kernel[kv_heads * rows, blocks.split](
                    out, *partial, sinks, tables.context_lens, blocks.slots, blocks.counts, starts,
                    blocks.requests, blocks.firsts,
                    ROWS=rows, DECODES=False, SINKS=sinks is not out, **self._join_shapes,
                )  # fmt: skip

    def _partials(self, out: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Allocate partial results of `rows` queries and spans; `out` stands for none."""
        if not rows:
            return out, out
        size = rows * self._layout.head_dim
        return tuple(torch.empty(n, dtype=torch.float32, device=out.device) for n in (size, rows))  # type: ignore[return-value]

    def _recorded_pieces(self, rows: int) -> int:
        """Return for how many pieces graphs of `rows` decodes have memory. Contexts may share pages."""
        span, layout = self._tables.blocks.span, self._layout
        pool = len(self._pool) * layout.page_size // span
        return min(rows * -(-self.limits.context // span), rows + SHARING * pool)


@dataclass(frozen=True, slots=True)
class TritonStep:
    """Valid until the next plan overwrites the tables."""

    backend: TritonAttention
    num_decodes: int
    pieces: int  # of decodes, at most
    filled: Filled | None  # None: of a recorded step, whose tables change
    joins: bool  # decodes may have several spans
    replayable: bool  # a recorded step may stand for it

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        heads, tokens, head_dim = query.shape[1:]
        new = tuple(x[0] if x.stride(3) == 1 else x[0].contiguous() for x in (query, key, value))
        out = query.new_empty(1, tokens, heads, head_dim)
        given = out if sinks is None else sinks
        if self.num_decodes:
            self.backend.decode(self, layer, out, new, scoring, sinks=given)
        if self.filled is not None and self.filled.prompts:
            self.backend.prompt(self, layer, out, new, scoring, sinks=given)
        return out


def _tables(blocks: QueryBlocks) -> tuple[Tensor, ...]:
    return blocks.requests, blocks.firsts, blocks.slots, blocks.counts, blocks.piece_blocks, blocks.piece_spans


def _power_of_two(n: int) -> int:
    """Return the smallest that is at least `n`."""
    return 1 << (n - 1).bit_length()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _kinds(scoring: Scoring, sinks: Tensor, out: Tensor) -> dict[str, bool]:
    return {"WINDOWED": scoring.window > 0, "CAPPED": scoring.softcap > 0, "SINKS": sinks is not out}
