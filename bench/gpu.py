"""Check and measure everything that needs a GPU. One JSON line a figure.

    python -m bench.gpu                                     # all parts but tune, about 8 minutes
    python -m bench.gpu --part kernels --part ids           # correctness; exits with 1 on a fault
    python -m bench.gpu --part steps --part mixed           # Qwen3-4B's shape, random weights, bf16
    python -m bench.gpu --part tune                         # the kernels with other tiles, beside torch's attention

Rooflines use the copy bandwidth and matmul rate measured just before.
"""

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum, auto
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from msgspec import structs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.attention_case import AttentionCase, Dtype, Outcome
from bench.engine import Bench, Machine, best_s, measure_machine, roofline_s, say
from components.kv_transfer.checksum import PageChecksums
from components.wire.layout import KvLayout
from components.wire.sampling import SamplingParams
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import StepLimits
from engine.attention.triton_backend import Tiles, TritonAttention, choose_tiles
from engine.build import make_pool
from engine.compilation.device import choose_device_forward
from engine.compilation.graphs import CudaRecorder
from engine.config import EngineConfig
from engine.kv.storage import allocate_storage
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.ports import EngineRequest, KvRegion

DEVICE: Final = "cuda:0"
QWEN3_4B: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TINY: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # so that greedy decoding does not repeat one token
}
BATCH, CONTEXT, PROMPT, STEPS = 100, 768, 8192, 32
LONG, QUESTION = 32768, 64


class Part(StrEnum):
    KERNELS = auto()
    IDS = auto()
    CHECKSUMS = auto()
    STEPS = auto()
    MIXED = auto()
    SKEW = auto()
    TUNE = auto()


def check_kernels() -> bool:
    """All kinds of steps against float64 attention. Compiling them takes most of the time."""
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
    wrong = 0
    for dtype, combinations in wanted.items():
        worst = 0.0
        for (queries, contexts), (kind, scoring) in itertools.product(steps, combinations):
            page_size, head_dim, kv_heads, group = kind
            case = AttentionCase(queries, contexts, scoring, dtype, kv_heads, group, page_size, head_dim)
            for make, sinks in ((TritonAttention, False), (partial(TritonAttention, span=64), True)):
                case = replace(case, sinks=sinks)
                try:
                    worst = max(worst, Outcome(case, make, DEVICE).check())
                except AssertionError as exc:
                    wrong += 1
                    print(exc, file=sys.stderr)
        _tell("kernels against attention written out", dtype=dtype, worst_error=worst, wrong=wrong)
    return not wrong


def check_ids() -> bool:
    """Greedy ids of a tiny fp32 model: torch's attention, the kernels, and graphs over a compiled model."""
    found: dict[str, dict[str, list[int]]] = {}
    ways: dict[str, dict[str, Any]] = {
        "torch": {"attention": "torch", "compile": "off"},
        "triton": {"attention": "triton", "compile": "off"},
        "graphs": {"attention": "triton", "compile": "wait"},
    }
    for name, changes in ways.items():
        config = EngineConfig(
            dtype="float32", device=DEVICE, num_pages=600, max_running=24, max_step_tokens=96, **changes
        )  # fmt: skip
        bench, _ = _bench(TINY, config, name)
        found[name] = _generate(bench, count=24, prompts=(3, 120), outputs=(20, 60))
    same = found["torch"] == found["triton"] == found["graphs"]
    _tell("greedy ids", same=same, tokens=sum(map(len, found["torch"].values())))
    return same


def check_checksums() -> bool:
    """Checksums on the device for smaller, equal and larger peer pages, against the same bytes in main memory."""
    layout = KvLayout(model="bench", dtype="bfloat16", page_size=64, layers=36, kv_heads=8, head_dim=128)
    pool = allocate_storage(layout, 40, torch.device(DEVICE)).normal_()
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
        _tell("checksums of KV on the device", peer_page_size=peer_page_size, same=sums[0] == sums[1], gb_s=gb_s)
    return not wrong


def measure_steps(bench: Bench, loaded: LoadedModel, machine: Machine) -> None:
    for batch in (1, BATCH):
        bench.decode(batch, CONTEXT, 4)
        total, host = bench.decode(batch, CONTEXT, STEPS)
        roof_s = roofline_s(loaded, machine, batch, batch * CONTEXT)
        facts = {"label": bench.label, "batch": batch, "context": CONTEXT, "host_ms": round(min(host) * 1000, 3)}
        say("decode step", total, roof_s, **facts, device_idle=_idle_share(bench, batch))
    layout = loaded.layout
    pairs = PROMPT * PROMPT / 2  # each key costs head_dim products, twice, in each head
    attention_flop = 4 * pairs * layout.layers * layout.kv_heads * loaded.query_group * layout.head_dim
    roof_s = roofline_s(loaded, machine, PROMPT, PROMPT) + attention_flop / machine.matmul_flop_s
    bench.prompt(PROMPT)
    spent = [bench.prompt(PROMPT) for _ in range(4)]
    say("prompt", spent, roof_s, label=bench.label, tokens=PROMPT, tok_s=round(PROMPT / min(spent)))


def measure_mixed(bench: Bench) -> None:
    """The first run compiles what is left to compile."""
    for attempt in range(2):
        started = time.perf_counter()
        tokens = _generate(bench, BATCH, prompts=(32, 1024), outputs=(32, 256), seed=attempt)
        spent_s = time.perf_counter() - started
    count = sum(map(len, tokens.values()))
    _tell(
        "mixed requests", requests=BATCH, output_tokens=count, seconds=round(spent_s, 2), tok_s=round(count / spent_s)
    )


def tune(machine: Machine) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_4B | {"num_hidden_layers": 1}))
        layout = structs.replace(load_model(directory, _config(), Path(directory), silent).layout, layers=36)
    group, limits = 4, StepLimits(BATCH, PROMPT, PROMPT)
    pages = layout.pages_for(CONTEXT)
    pool = allocate_storage(layout, max(BATCH * pages, layout.pages_for(PROMPT)), torch.device(DEVICE)).normal_()
    best = choose_tiles(layout.head_dim, pool.dtype)
    for batch in (1, BATCH):
        shape = StepShape(
            [1] * batch, [CONTEXT] * batch, [list(range(i * pages, (i + 1) * pages)) for i in range(batch)]
        )
        roof_s = batch * CONTEXT * layout.page_bytes / layout.page_size / machine.copy_bytes_s
        shapes = itertools.product((32, 64, 128), (4, 8), (3, 5, 6), (528, 1056, 2112), (256, 512, 1024))
        for n, warps, stages, programs, span in shapes:
            tiles = replace(best, decode_n=n, decode_warps=warps, decode_stages=stages)
            facts = {"batch": batch, "n": n, "warps": warps, "stages": stages, "programs": programs, "span": span}
            attention = TritonAttention(pool, layout, group, limits, tiles=tiles, programs=programs, span=span)
            _time_layers("decode attention", attention, shape, batch, group, roof_s, **facts)
    shape = StepShape([PROMPT], [PROMPT], [list(range(layout.pages_for(PROMPT)))])
    roof_s = 4 * PROMPT * PROMPT / 2 * layout.layers * 32 * layout.head_dim / machine.matmul_flop_s
    for m, n, warps, stages in [*itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4)), (128, 32, 8, 4)]:
        tiles = Tiles(best.decode_n, best.decode_warps, best.decode_stages, m, n, warps, stages)
        attention = TritonAttention(pool, layout, group, limits, tiles=tiles)
        facts = {"m": m, "n": n, "warps": warps, "stages": stages}
        _time_layers("prompt attention", attention, shape, PROMPT, group, roof_s, **facts)
    query, key = (torch.randn(1, heads, PROMPT, 128, device=DEVICE, dtype=pool.dtype) for heads in (32, 8))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            work = partial(scaled_dot_product_attention, query, key, key, is_causal=True, enable_gqa=True)
            _time("prompt attention of torch", partial(_repeat, work, 36), roof_s, kind=backend.name)


def measure_skew(machine: Machine) -> None:
    """One long request among many short ones, and a short question after a long cached prefix: attention alone."""
    layout = KvLayout(model="bench", dtype="bfloat16", page_size=16, layers=36, kv_heads=8, head_dim=128)
    group, limits = 4, StepLimits(BATCH + 1, PROMPT, LONG)
    pool = allocate_storage(layout, BATCH * layout.pages_for(CONTEXT) + layout.pages_for(LONG), torch.device(DEVICE))
    attention = TritonAttention(pool.normal_(), layout, group, limits)
    for figure, lens, contexts in (
        ("100 short decodes", [1] * BATCH, [CONTEXT] * BATCH),
        ("and a long one", [1] * (BATCH + 1), [*[CONTEXT] * BATCH, LONG]),
        ("a question after a long prefix", [QUESTION], [LONG]),
    ):
        pages = iter(torch.randperm(len(pool)).tolist())
        tables = [list(itertools.islice(pages, layout.pages_for(context))) for context in contexts]
        roof_s = sum(contexts) * layout.page_bytes / layout.page_size / machine.copy_bytes_s
        _time_layers(figure, attention, StepShape(lens, contexts, tables), sum(lens), group, roof_s)


def _time_layers(
    figure: str, attention: TritonAttention, shape: StepShape, tokens: int, group: int, roof_s: float, **facts: Any
) -> None:
    layout = attention._layout
    query, key = (
        torch.randn(1, tokens, heads, layout.head_dim, device=DEVICE, dtype=attention._pool.dtype).transpose(1, 2)
        for heads in (layout.kv_heads * group, layout.kv_heads)
    )
    step = attention.plan(shape)

    def layers() -> None:
        for layer in range(layout.layers):
            step.attend(layer, query, key, key, Scoring(0.088))

    try:
        layers()
        replay = CudaRecorder()(layers)
    except Exception as exc:  # noqa: BLE001 - tiles that do not fit are refused in many ways: the others are of use
        _tell(figure, **facts, refused=str(exc).splitlines()[0][:100])
        return
    _time(figure, replay, roof_s, **facts)


def _time(figure: str, work: Callable[[], object], roof_s: float, **facts: Any) -> None:
    try:
        spent_s = best_s(work, DEVICE, times=6)
    except RuntimeError as exc:
        _tell(figure, **facts, refused=str(exc).splitlines()[0][:100])
        return
    facts |= {"ms": round(spent_s * 1000, 3), "roofline_ms": round(roof_s * 1000, 3)}
    _tell(figure, **facts, of_roofline=round(spent_s / roof_s, 2))


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _idle_share(bench: Bench, batch: int) -> float | None:
    """By the device's own record of kernels."""
    with bench.decoding(batch, CONTEXT, STEPS):
        bench.engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(STEPS // 2):
                bench.engine.step()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type.name == "CUDA"
    )
    return idle_share(spans) if spans else None


def idle_share(spans: list[tuple[float, float]]) -> float:
    """The share of the time that the sorted `spans` do not cover."""
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return round(1 - busy / (reached - spans[0][0]), 4)


def _generate(
    bench: Bench, count: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 0
) -> dict[str, list[int]]:
    draw = random.Random(seed)
    for i in range(count):
        length, limit = draw.randint(*prompts), draw.randint(*outputs)
        tokens = [draw.randrange(bench.vocab_size) for _ in range(length)]
        sampling = SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True)
        bench.engine.submit(EngineRequest(f"{seed}-{i}", tokens, sampling))
    found: dict[str, list[int]] = {}
    while bench.engine.has_work():
        for output in bench.engine.step().tokens:
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def _config() -> EngineConfig:
    pages = int(BATCH * (CONTEXT + 512) / 16) + 2 * PROMPT // 16
    return EngineConfig(
        device=DEVICE,
        load_format="dummy",
        num_pages=pages,
        max_running=BATCH,
        max_step_tokens=PROMPT + BATCH,
        compile="wait",
        compile_timeout_s=400,
    )


def _bench(described: dict[str, Any], config: EngineConfig, label: str) -> tuple[Bench, LoadedModel]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(described))
        loaded = load_model(directory, replace(config, load_format="dummy"), Path(directory), silent)
    started = time.perf_counter()
    pool = make_pool(loaded, config)
    forward = choose_device_forward(loaded, config, pool.attention, silent)
    _tell("engine ready", label=label, seconds=round(time.perf_counter() - started, 1), compile=config.compile)
    return Bench(loaded, config, forward, label, pool), loaded


def _tell(figure: str, **facts: Any) -> None:
    print(json.dumps({"figure": figure, **facts}), flush=True)


def _run(parts: list[Part]) -> Iterator[bool]:
    if Part.KERNELS in parts:
        yield check_kernels()
    if Part.IDS in parts:
        yield check_ids()
    if Part.CHECKSUMS in parts:
        yield check_checksums()
    machine = measure_machine(torch.bfloat16, DEVICE)
    _tell(
        "device",
        name=torch.cuda.get_device_name(),
        copy_tb_s=round(machine.copy_bytes_s / 1e12, 2),
        matmul_tflop_s=round(machine.matmul_flop_s / 1e12),
        torch=torch.__version__,
    )
    if Part.SKEW in parts:
        measure_skew(machine)
    if Part.TUNE in parts:
        tune(machine)
    if Part.STEPS in parts or Part.MIXED in parts:
        bench, loaded = _bench(QWEN3_4B, _config(), "triton, compiled, graphs")
        if Part.STEPS in parts:
            measure_steps(bench, loaded, machine)
        if Part.MIXED in parts:
            measure_mixed(bench)


def main(
    part: Annotated[list[Part] | None, typer.Option(help="may be given several times; default: all but tune")] = None,
) -> None:
    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs a CUDA device: torch finds none")
    torch.cuda.set_device(DEVICE)
    sys.exit(not all(list(_run(part or [each for each in Part if each is not Part.TUNE]))))


if __name__ == "__main__":
    typer.run(main)
