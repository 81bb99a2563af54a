"""Compares results of the device with other implementations."""

import asyncio
import itertools
import os
import random
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.attention_case import AttentionCase, Dtype, Outcome
from bench.gpu.engines import EXACT, config_of, generate, make_bench, requests
from bench.gpu.report import print_figure
from bench.gpu.scale import TINY, Scale
from components.kv_transfer.checksum import PageChecksums
from components.wire.layout import KvLayout, KvRegion
from components.wire.sampling import SamplingParams
from engine.attention.backend import Scoring
from engine.attention.choose_attention import takes_pages
from engine.attention.triton_backend import TritonAttention
from engine.device.copies import Arrival
from engine.kv.offload_memory import PageCopies, allocate_offloaded
from engine.kv.storage import allocate_storage
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.row import Row
from engine.sampling.sampler import HostSampler


def check_kernels(scale: Scale) -> bool:
    """Check all kinds of steps against float64 attention. Compiling takes most of the time."""
    if scale.on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        print_figure("kernels against attention written out", skipped="on a CPU it needs TRITON_INTERPRET=1")
        return True
    steps = [
        ((1,), (1,)),
        ((1,) * 5, (1, 17, 200, 1000, 5000)),
        ((300, 16), (300, 90)),
        ((1, 1, 130, 2), (4, 700, 900, 2)),
    ]
    plain, windowed, capped, both = (
        Scoring(0.09),
        Scoring(0.09, window=100),
        Scoring(0.3, 0, 5.0),
        Scoring(0.2, 33, 5.0),
    )
    kinds = [(16, 128, 8, 4), (32, 64, 4, 1), (64, 80, 1, 8), (128, 96, 2, 3), (16, 256, 2, 2), (32, 16, 2, 7)]
    wanted: dict[Dtype, list[tuple[tuple[int, ...], Scoring]]] = {
        "bfloat16": [*itertools.product(kinds, (plain, both)), (kinds[0], windowed), (kinds[0], capped)],
        "float16": [(kinds[0], both)],
        "float32": [(kinds[0], plain), (kinds[1], both)],
    }
    if scale.on_cpu:
        steps, wanted = steps[2:3], {"float32": [(kinds[5], plain)]}
    split = partial(TritonAttention, span=64)
    makers = ((TritonAttention, False, False), (split, True, False), (split, False, True))
    wrong = 0
    for dtype, combinations in wanted.items():
        worst = 0.0
        for (queries, contexts), (kind, scoring) in itertools.product(steps, combinations):
            page_size, head_dim, kv_heads, group = kind
            case = AttentionCase(queries, contexts, scoring, dtype, kv_heads, group, page_size, head_dim)
            for make, sinks, eight_bits in makers:
                case = replace(case, sinks=sinks, eight_bits=eight_bits)
                if not takes_pages(torch.device(scale.device), case.layout):
                    continue
                try:
                    worst = max(worst, Outcome(case, make, scale.device).check())
                except torch.AcceleratorError:
                    raise  # the device is lost
                except Exception as exc:  # noqa: BLE001 - whatever a compiler or a launch raises
                    wrong += 1
                    print(f"{case}: {type(exc).__name__}: {exc}", file=sys.stderr)
        print_figure("kernels against attention written out", dtype=dtype, worst_error=worst, wrong=wrong)
    return not wrong


def check_draws(scale: Scale) -> bool:
    """Check that the sampling kernel draws the same tokens as the CPU's sampler."""
    if scale.on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        print_figure("draws beside the CPU's", skipped="on a CPU it needs TRITON_INTERPRET=1")
        return True
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"temperature": 1.3, "min_p": 0.02},
        {"top_p": 0.7},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": ((5, 4.0), (9, -3.0)), "min_tokens": 3, "stop_token_ids": (7,)},
    ]
    num_rows, vocab = (8, 300) if scale.on_cpu else (256, 151_936)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    device, found = torch.device(scale.device), []
    for sampler in (DeviceSampler(device), HostSampler()):
        rows = [
            Row(SamplingParams(**{"max_tokens": 9, "seed": i, **ways[i % len(ways)]}), [1, 5, 5, i % 7], 2)
            for i in range(num_rows)
        ]
        draw = sampler.draw(logits.to(device) if isinstance(sampler, DeviceSampler) else logits.clone(), rows)
        Arrival(device).wait()
        found.append(draw.read())
    wrong = sum(one != other for one, other in zip(*found, strict=True))
    print_figure("draws beside the CPU's", rows=num_rows, vocab=vocab, wrong=wrong)
    return not wrong


def check_ids(scale: Scale) -> bool:
    """Compare greedy ids of a tiny fp32 model: torch's attention, the kernels, and graphs of a compiled model."""
    ways: dict[str, dict[str, Any]] = {"torch": {"attention": "torch", "compile": "off"}}
    if scale.on_cpu:
        ways["auto"] = {"attention": "auto", "compile": "off"}
    else:
        ways["triton"] = {"attention": "triton", "compile": "off"}
        ways["graphs"] = {"attention": "triton", "compile": "wait"}
    found: dict[str, dict[str, list[int]]] = {}
    for name, changes in ways.items():
        config = config_of(scale, **EXACT, **changes)
        bench, _ = make_bench(TINY, config, name)
        found[name] = generate(bench.engine, requests(bench.vocab_size, 24, prompts=(3, 120), outputs=(20, 60)))
    same = all(each == found["torch"] for each in found.values())
    print_figure("greedy ids", same=same, ways=sorted(found), tokens=sum(map(len, found["torch"].values())))
    return same


def check_checksums(scale: Scale) -> bool:
    """Check checksums on the device, for smaller, equal and larger peer pages, against those in main memory."""
    layout = KvLayout(model="bench", dtype="bfloat16", page_size=64, layers=scale.layers, kv_heads=8, head_dim=128)
    pool = allocate_storage(layout, 40, torch.device(scale.device)).normal_()
    host = pool.cpu()
    table, tokens, wrong = random.Random(0).sample(range(40), 30), range(128, 1900), 0
    for peer_page_size in (16, 64, 128):
        sums = []
        for memory in (host, pool):
            region = KvRegion(memory.data_ptr(), 40, layout, str(memory.device))
            checksums = PageChecksums(region).of_transfer(peer_page_size)
            started = time.perf_counter()
            asyncio.run(checksums.add(table, tokens))
            spent_s = time.perf_counter() - started
            sums.append(asyncio.run(checksums.total()))
        wrong += sums[0] != sums[1]
        gb_s = round(len(tokens) // 64 * layout.page_bytes / spent_s / 1e9, 2)
        print_figure("checksums of KV on the device", peer_page_size=peer_page_size, same=sums[0] == sums[1], gb_s=gb_s)
    return not wrong


def check_offload(scale: Scale) -> bool:
    """Check the bytes of pages that are evicted to main memory and restored, and measure GB/s in both directions."""
    device = torch.device(scale.device)
    layout = KvLayout(model="bench", dtype="bfloat16", page_size=16, layers=scale.layers, kv_heads=8, head_dim=128)
    count = scale.prompt // 16
    pool = allocate_storage(layout, count, device).normal_()
    copies = PageCopies(pool, allocate_offloaded(layout, count, device))
    before = pool.clone()
    out = [(page, count + page) for page in range(count)]
    back = [(target, source) for source, target in reversed(out)]
    speeds: dict[str, float] = {}
    for name, moves in (("out", out), ("back", back), ("out again", out), ("back again", back)):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copies' stream does not wait for what was enqueued here
        started = time.perf_counter()
        copies.copy(moves)
        speeds[name] = round(count * layout.page_bytes / (time.perf_counter() - started) / 1e9, 2)
        if name == "out":
            pool.zero_()
    same = torch.equal(pool, before)
    print_figure(
        "evicted pages to main memory and back, GB/s", pages=count, page_bytes=layout.page_bytes, same=same, **speeds
    )
    return same
