"""Measures step times: decodes, prompts, sampling, unequal contexts, and the host's part."""

import statistics
import time

import torch

from bench.engine import Bench, Machine, print_times, roofline_s
from bench.gpu.engines import built, config_of, exact_ids, generate, requests
from bench.gpu.report import Report, Target, print_figure
from bench.gpu.scale import TINY, Scale
from bench.host_step import host_steps
from engine.model.load import LoadedModel

SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # Qwen3's defaults
HOST_STEPS = 100


def measure_steps(scale: Scale, bench: Bench, loaded: LoadedModel, machine: Machine, report: Report) -> None:
    context = scale.context
    for batch in (1, scale.batch):
        contexts = [context] * batch
        bench.decode(contexts, scale.steps)
        total, host = bench.decode(contexts, scale.steps)
        roof_s = roofline_s(loaded, machine, batch, batch * context)
        facts = {"label": bench.label, "batch": batch, "context": context, "host_ms": round(min(host) * 1000, 3)}
        print_times("decode step", total, roof_s, **facts, forward=bench.forward_kind)
        if batch == scale.batch:
            report.record(Target.DECODE, statistics.median(total) / roof_s)
    layout, length = loaded.layout, scale.prompt
    pairs = length * length / 2  # each key costs head_dim products, twice, in each head
    attention_flop = 4 * pairs * layout.layers * layout.kv_heads * loaded.query_group * layout.head_dim
    roof_s = roofline_s(loaded, machine, length, length) + attention_flop / machine.matmul_flop_s
    bench.prompt(length)
    spent = [bench.prompt(length) for _ in range(4)]
    facts = {"label": bench.label, "tokens": length, "tok_s": round(length / min(spent))}
    print_times("prompt", spent, roof_s, **facts, forward=bench.forward_kind)
    report.record(Target.PROMPT, length / statistics.median(spent))


def measure_mixed(scale: Scale, bench: Bench) -> None:
    """Measure mixed steps. The first run compiles the remaining kernels."""
    longest = scale.longest
    for attempt in range(2):
        asked = requests(bench.vocab_size, scale.batch, (min(32, longest), longest), (8, max(8, longest // 4)), attempt)
        started = time.perf_counter()
        tokens = generate(bench.engine, asked)
        spent_s = time.perf_counter() - started
    count = sum(map(len, tokens.values()))
    print_figure(
        "mixed requests",
        requests=len(asked),
        output_tokens=count,
        seconds=round(spent_s, 2),
        tok_s=round(count / spent_s),
    )


def measure_sampling(scale: Scale, bench: Bench, report: Report) -> None:
    """Measure greedy and sampled steps, by turns."""
    contexts = [scale.context] * scale.batch
    ways = {"greedy": {}, "sampled": SAMPLED}
    spent: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for turn in range(4):
        for name, sampling in ways.items():
            total, _ = bench.decode(contexts, scale.steps, **sampling)
            if turn:  # the first compiles
                spent[name] += total
    for name, seconds in spent.items():
        print_times("decode step by sampling", seconds, 0.0, batch=scale.batch, context=scale.context, sampling=name)
    report.record(Target.SAMPLED, statistics.median(spent["sampled"]) / statistics.median(spent["greedy"]))


def measure_skew(scale: Scale, bench: Bench, loaded: LoadedModel, machine: Machine, report: Report) -> None:
    """Measure one long context among short ones, which should only add the time to read it."""
    short = [scale.short_context] * scale.batch
    medians = []
    for contexts in (short, [*short[1:], scale.long_context]):
        bench.decode(contexts, scale.steps)
        total, _ = bench.decode(contexts, scale.steps)
        roof_s = roofline_s(loaded, machine, len(contexts), sum(contexts))
        print_times(
            "decode step by contexts", total, roof_s, batch=len(contexts), longest=max(contexts), shortest=min(contexts)
        )
        medians.append(statistics.median(total))
    more = (scale.long_context - scale.short_context) * loaded.layout.page_bytes / loaded.layout.page_size
    own_s = more / machine.copy_bytes_s
    report.record(Target.SKEW, (medians[1] - medians[0]) / own_s)


def measure_host(scale: Scale) -> None:
    """Measure the host's part: real core, tables and sampler on the device, with a forward that costs nothing."""
    device = torch.device(scale.device)
    steps = scale.steps if scale.on_cpu else HOST_STEPS
    for batch, way, spent in host_steps(scale.host_batches, steps, device, scale.context):
        print_times("host's part of a decode step", spent, 0.0, batch=batch, context=scale.context, sampling=way)


def measure_idle(scale: Scale, bench: Bench) -> None:
    """Measure the share of decode steps in which the device is idle, by its profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU if scale.on_cpu else torch.profiler.ProfilerActivity.CUDA]
    kind = "CPU" if scale.on_cpu else "CUDA"
    for batch in (1, scale.batch):
        with bench.decoding([scale.context] * batch, scale.steps):
            bench.engine.step()
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(scale.steps // 2):
                    bench.engine.step()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type.name == kind
        )
        print_figure("idle device", batch=batch, share=idle_share(spans) if spans else None)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time that the sorted `spans` do not cover."""
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return round(1 - busy / (reached - spans[0][0]), 4)


RANKS = 2


def measure_ranks(scale: Scale) -> bool:
    """Compare one engine on two devices with one on one device. On a CPU the two ranks share the cores."""
    devices = RANKS if scale.on_cpu else torch.cuda.device_count()
    if devices < RANKS:
        print_figure("two ranks", skipped=f"this needs {RANKS} devices, and {devices} is here")
        return True
    asked = requests(TINY["vocab_size"], 12, prompts=(3, 120), outputs=(20, 40))
    one, several = (exact_ids(scale, asked, tensor_parallel=ranks) for ranks in (1, RANKS))
    print_figure("ids of two ranks", same=one == several, tokens=sum(map(len, one.values())))
    for ranks in (1, RANKS):
        _measure_on(scale, ranks)
    return one == several


def _measure_on(scale: Scale, ranks: int) -> None:
    """Measure and free an engine, so that the next one can use its memory."""
    config = config_of(scale, tensor_parallel=ranks)
    with built(scale.model, config) as engine:
        bench = Bench(engine, config, f"{ranks} ranks")
        contexts = [scale.context] * scale.batch
        bench.decode(contexts, scale.steps)
        total, _ = bench.decode(contexts, scale.steps)
        print_times("decode step by ranks", total, 0.0, ranks=ranks, batch=scale.batch, context=scale.context)
        bench.prompt(scale.prompt)
        print_times(
            "prompt by ranks", [bench.prompt(scale.prompt) for _ in range(3)], 0.0, ranks=ranks, tokens=scale.prompt
        )
