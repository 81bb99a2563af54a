"""Measures the kernels with other tiles, and torch's attention."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.engine import Machine, best_s
from bench.gpu.report import print_figure
from bench.gpu.scale import Scale
from components.wire.layout import KvLayout
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import StepLimits
from engine.attention.triton_backend import Tiles, TritonAttention, choose_tiles
from engine.compilation.graphs import CaptureFailed, CudaRecorder
from engine.kv.storage import allocate_storage

GROUP: Final = 4  # query heads for a key head


def tune(scale: Scale, machine: Machine) -> None:
    if scale.on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        print_figure("tiles", skipped="on a CPU it needs TRITON_INTERPRET=1")
        return
    kv_heads, head_dim = (2, 16) if scale.on_cpu else (8, 128)  # Qwen3-4B's
    layout = KvLayout(
        model="tune", dtype=scale.dtype, page_size=16, layers=scale.layers, kv_heads=kv_heads, head_dim=head_dim
    )
    limits = StepLimits(scale.batch, scale.prompt, max(scale.prompt, scale.context))
    num_pages = max(scale.batch * layout.pages_for(scale.context), layout.pages_for(scale.prompt))
    pool = allocate_storage(layout, num_pages, torch.device(scale.device)).normal_()
    kept = slice(0, 1 if scale.on_cpu else None)
    _tune_decodes(scale, machine, pool, layout, limits, kept)
    _tune_prompts(scale, machine, pool, layout, limits, kept)


def _tune_decodes(
    scale: Scale, machine: Machine, pool: torch.Tensor, layout: KvLayout, limits: StepLimits, kept: slice
) -> None:
    context, pages = scale.context, layout.pages_for(scale.context)
    best = choose_tiles(layout.head_dim, pool.dtype)
    choices = list(itertools.product((32, 64, 128), (4, 8), (3, 5, 6), (528, 1056, 2112), (256, 512, 1024)))
    for batch in (1, scale.batch):
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(batch)]
        shape = StepShape([1] * batch, [context] * batch, tables)
        roof_s = batch * context * layout.page_bytes / layout.page_size / machine.copy_bytes_s
        for n, warps, stages, programs, span in choices[kept]:
            tiles = replace(best, decode_n=n, decode_warps=warps, decode_stages=stages)
            facts = {"batch": batch, "n": n, "warps": warps, "stages": stages, "programs": programs, "span": span}
            attention = TritonAttention(pool, layout, GROUP, limits, tiles=tiles, programs=programs, span=span)
            _time_layers("decode attention", attention, shape, batch, roof_s, **facts)


def _tune_prompts(
    scale: Scale, machine: Machine, pool: torch.Tensor, layout: KvLayout, limits: StepLimits, kept: slice
) -> None:
    length, heads = scale.prompt, layout.kv_heads * GROUP
    best = choose_tiles(layout.head_dim, pool.dtype)
    shape = StepShape([length], [length], [list(range(layout.pages_for(length)))])
    roof_s = 4 * length * length / 2 * layout.layers * heads * layout.head_dim / machine.matmul_flop_s
    for m, n, warps, stages in [*itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4)), (128, 32, 8, 4)][kept]:
        tiles = Tiles(best.decode_n, best.decode_warps, best.decode_stages, m, n, warps, stages)
        attention = TritonAttention(pool, layout, GROUP, limits, tiles=tiles)
        facts = {"m": m, "n": n, "warps": warps, "stages": stages}
        _time_layers("prompt attention", attention, shape, length, roof_s, **facts)
    query, key = (
        torch.randn(1, count, length, layout.head_dim, device=pool.device, dtype=pool.dtype)
        for count in (heads, layout.kv_heads)
    )
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            work = partial(scaled_dot_product_attention, query, key, key, is_causal=True, enable_gqa=True)
            repeated = partial(_repeat, work, layout.layers)
            _time("prompt attention of torch", str(pool.device), repeated, roof_s, kind=backend.name)


def _time_layers(
    figure: str, attention: TritonAttention, shape: StepShape, tokens: int, roof_s: float, **facts: Any
) -> None:
    layout, pool = attention._layout, attention._pool
    query, key = (
        torch.randn(1, tokens, heads, layout.head_dim, device=pool.device, dtype=pool.dtype).transpose(1, 2)
        for heads in (layout.kv_heads * GROUP, layout.kv_heads)
    )
    step = attention.plan(shape)

    def layers() -> None:
        for layer in range(layout.layers):
            step.attend(layer, query, key, key, Scoring(0.088))

    try:
        layers()
        replay = CudaRecorder()(layers) if pool.is_cuda else layers
    except CaptureFailed:
        raise  # nothing more may be recorded
    except Exception as exc:  # noqa: BLE001 - tiles that do not fit are refused in many ways: the others are of use
        print_figure(figure, **facts, refused=str(exc).splitlines()[0][:100])
        return
    _time(figure, str(pool.device), replay, roof_s, **facts)


def _time(figure: str, device: str, work: Callable[[], object], roof_s: float, **facts: Any) -> None:
    try:
        spent_s = best_s(work, device, times=6 if device != "cpu" else 1)
    except RuntimeError as exc:
        print_figure(figure, **facts, refused=str(exc).splitlines()[0][:100])
        return
    facts |= {"ms": round(spent_s * 1000, 3), "roofline_ms": round(roof_s * 1000, 3)}
    print_figure(figure, **facts, of_roofline=round(spent_s / roof_s, 2))


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()
