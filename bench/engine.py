"""Step times of the engine alone, compared with the machine's roofline. Prints one JSON line per figure.

    python -m bench.engine --model smollm2-135m --compile wait --threads 2
    python -m bench.engine --host             # the host's part of a step of 100 and of 256 decodes, without a model
    python -m bench.engine --neighbours 0 --neighbours 1 --neighbours 2    # with busy processes

Eager and compiled steps run by turns, because on a shared machine only ratios are meaningful. The roofline is the
larger of bytes of weights and KV over the measured copy bandwidth, and FLOPs over the measured matmul rate.
"""

import engine  # noqa: F401  # before torch: it bounds how long OpenMP's threads spin

# isort: split
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer

from bench.host_step import CONTEXT, WAYS, host_steps, launches
from bench.load.report import machine_and_date
from components.wire.sampling import SamplingParams
from engine.attention.choose_attention import prepare_attention
from engine.build import assemble
from engine.compilation.forward import EagerForward
from engine.compilation.packages import choose_forward
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels.linear import pack_linears
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.ports import EngineRequest, StepOutput
from engine.runner.step_runner import Launched, Runner
from engine.scheduler.request import Chunk

COPY_BYTES = 256 * 1024 * 1024  # larger than any cache
PAGES_MARGIN = 1.1
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"  # ends with us
SETTLE_S = 1.0  # time for the engine to adapt to its neighbours
BESIDE_S = 4.0  # duration of decode steps with neighbours
BESIDE_STEPS = 400
HOST_BATCHES = (100, 256)
HOST_STEPS = 100


@dataclass(frozen=True, slots=True)
class Machine:
    copy_bytes_s: float  # read and written
    matmul_flop_s: float


class TimedRunner:
    """Measures the time in the runner; the rest of a step is scheduling."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, chunks: Sequence[Chunk]) -> "TimedStep":
        with self.timed():
            return TimedStep(self, self._runner.launch(chunks))

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        with self.timed():
            self._runner.copy_pages(moves)

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - started


class TimedStep:
    def __init__(self, runner: TimedRunner, step: Launched) -> None:
        self._runner = runner
        self._step = step
        self.chunks = step.chunks

    def sample(self) -> None:
        with self._runner.timed():
            self._step.sample()

    def wait_s(self) -> float:
        return self._step.wait_s()

    def result(self) -> Sequence[Sequence[int]]:
        with self._runner.timed():
            return self._step.result()


class Bench:
    def __init__(self, core: EngineCore, config: EngineConfig, label: str) -> None:
        self.label = label
        self.engine = core
        self._runner = TimedRunner(core._runner)
        core._runner = cast("Runner", self._runner)
        core._chunk_limit = None  # otherwise chunks would be short on a slow machine, and filling would take many steps
        self.vocab_size = core.vocab_size
        self._step_tokens = config.step_size(core.kv_region.device).tokens
        self._draw = random.Random(0)

    @property
    def forward_kind(self) -> str:
        """Kind of the latest step."""
        return str(self._runner.forward_kind)

    def submit(self, prompt_lens: Sequence[int], output_tokens: int, **sampling: Any) -> list[str]:
        params = SamplingParams(**{"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, **sampling})
        names = [f"{self.label}-{self._draw.random()}" for _ in prompt_lens]
        for name, length in zip(names, prompt_lens, strict=True):
            tokens = [self._draw.randrange(self.vocab_size) for _ in range(length)]
            self.engine.submit(EngineRequest(name, tokens, params))
        return names

    @contextmanager
    def decoding(self, contexts: Sequence[int], steps: int, **sampling: Any) -> Iterator[None]:
        """Run a decode for each context within the block. The longest are added first, or they would delay the others."""
        lengths = sorted((context - steps for context in contexts), reverse=True)
        # run until all prompts are computed; each step completes one of them, or is full
        filling = len(lengths) + sum(lengths) // self._step_tokens + 2
        names = self.submit(lengths, filling + steps, **sampling)
        while len(self._step().tokens) < len(lengths):
            assert self.engine.has_work(), "the first requests ended before all prompts were computed"
        yield
        for name in names:
            self.engine.cancel(name)

    def decode(self, contexts: Sequence[int], steps: int, **sampling: Any) -> tuple[list[float], list[float]]:
        """Return the seconds of each step, and those outside the runner."""
        total, host = [], []
        with self.decoding(contexts, steps, **sampling):
            for _ in range(steps):
                before, started = self._runner.spent_s, time.perf_counter()
                self._step()
                total.append(time.perf_counter() - started)
                host.append(total[-1] - (self._runner.spent_s - before))
        return total, host

    def decode_for(self, seconds: float, batch: int, context: int) -> list[float]:
        """Return the seconds of each decode step, until the time or the tokens after the first `context` are used up."""
        total: list[float] = []
        with self.decoding([context + BESIDE_STEPS] * batch, BESIDE_STEPS):
            while sum(total) < seconds and len(total) < BESIDE_STEPS:
                started = time.perf_counter()
                self._step()
                total.append(time.perf_counter() - started)
        return total

    def prompt(self, length: int) -> float:
        """Return the seconds to the first token."""
        self.submit([length], 1)
        started = time.perf_counter()
        while self.engine.has_work():
            self._step()
        return time.perf_counter() - started

    def _step(self) -> StepOutput:
        output = self.engine.step()
        if output.failed:
            raise output.failed[0].error
        return output


def measure_machine(dtype: torch.dtype, device: str = "cpu") -> Machine:
    """Measure the machine: the best of several runs, so that a neighbour's burst does not lower the roof.

    The numbers are random, because a GPU is faster with zeros.
    """
    if device == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        # torch has no fast bfloat16 on this machine, while packed products are as fast as in float32
        dtype = torch.float32
    rows, width, copied = (1024, 2048, COPY_BYTES) if device == "cpu" else (8192, 8192, 16 * COPY_BYTES)
    source = torch.randint(255, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(rows, width, device=device).to(dtype), torch.randn(width, width, device=device).to(dtype)
    return Machine(
        copy_bytes_s=2 * copied / best_s(lambda: target.copy_(source), device),
        matmul_flop_s=2 * rows * width * width / best_s(lambda: left @ right, device),
    )


def best_s(work: Callable[[], object], device: str = "cpu", times: int = 8) -> float:
    spent: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    return min(spent)


def roofline_s(loaded: LoadedModel, machine: Machine, tokens: int, kv_tokens: int) -> float:
    head = set(loaded.module.get_output_embeddings().parameters())
    embeddings = set(loaded.module.get_input_embeddings().parameters())  # only looked up
    rest = set(loaded.module.parameters()) - head - embeddings
    weight_bytes: int = sum(parameter.numel() * parameter.element_size() for parameter in head | rest)
    kv_bytes = kv_tokens * loaded.layout.page_bytes / loaded.layout.page_size
    flop: int = 2 * tokens * sum(parameter.numel() for parameter in rest)
    return max((weight_bytes + kv_bytes) / machine.copy_bytes_s, flop / machine.matmul_flop_s)


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Run busy processes, each in its own session, so that they get a fair share of the cores."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_beside(bench: Bench, count: int, batches: Sequence[int], context: int, length: int) -> None:
    facts = {"label": bench.label, "neighbours": count}
    with busy_neighbours(count):
        for batch in batches:
            bench.decode_for(SETTLE_S, batch, context)
            spent = bench.decode_for(BESIDE_S, batch, context)
            p99 = round(sorted(spent)[int(0.99 * len(spent))] * 1000, 1)
            rate = round(batch * len(spent) / sum(spent), 1)
            print_times(
                "decode with neighbours", spent, 0.0, **facts, batch=batch, context=context, ms_p99=p99, tok_s=rate
            )
        print_times("prompt with neighbours", [bench.prompt(length) for _ in range(4)], 0.0, **facts, tokens=length)


def measure_host() -> None:
    for on_device in (False, True):
        for size, way, spent in host_steps(HOST_BATCHES, HOST_STEPS, on_device=on_device):
            facts = {"batch": size, "context": CONTEXT, "sampling": way, "sampler": "device" if on_device else "cpu"}
            if on_device:
                facts["launches"] = launches(WAYS[way])
            print_times("host's part of a decode step", spent, 0.0, **facts)


def print_times(figure: str, seconds: list[float], roof_s: float, **facts: Any) -> None:
    line = {
        "figure": figure,
        **facts,
        "ms_min": round(min(seconds) * 1000, 3),
        "ms_p50": round(statistics.median(seconds) * 1000, 3),
        "roofline_ms": round(roof_s * 1000, 3),
        "of_roofline": round(min(seconds) / roof_s, 2) if roof_s else None,
        "load": round(os.getloadavg()[0], 1),
        **machine_and_date(),
    }
    print(json.dumps(line), flush=True)


def main(
    model: Annotated[str, typer.Option(help="model, as for the services")] = "smollm2-135m",
    state_dir: Annotated[Path, typer.Option(help="directory of models and packages")] = Path("~/.cache/kvmesh"),
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    compile: Annotated[Literal["wait", "off"], typer.Option(help="wait: compile first; off: only eager")] = "wait",  # noqa: A002
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    batch: Annotated[list[int], typer.Option(help="decode batches; may be given several times")] = [1, 8, 32],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="tokens of context of each decode")] = [320, 1024],  # noqa: B006
    prompt: Annotated[list[int], typer.Option(help="prompt lengths")] = [256, 1024],  # noqa: B006
    steps: Annotated[int, typer.Option(help="decode steps per figure")] = 24,
    neighbours: Annotated[
        list[int] | None,
        typer.Option(help="only measure decodes and prompts with this many busy processes; may be given several times"),
    ] = None,
    only_host: Annotated[bool, typer.Option("--host", help="only measure the host's part of a decode step")] = False,
) -> None:
    if only_host:
        measure_host()
        return
    generated = BESIDE_STEPS if neighbours else 32
    tokens = int(PAGES_MARGIN * max(batch) * (max(context) + generated)) + 2 * max(prompt)
    # without drafts, with which a step has more rows, and requests end before the last step
    config = EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]
        threads=threads,
        num_pages=tokens // 16,
        compile=compile,
        speculative_tokens=0,
    )
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, config, state_dir, silent)
    prepare_attention(config.attention, loaded.device, state_dir)
    pack_linears(loaded.module)
    started = time.perf_counter()
    benches = [Bench(assemble(loaded, config, EagerForward(loaded.module)), config, "eager")]
    if compile == "wait":
        forward = choose_forward(model, loaded, config, state_dir, silent)
        print_times("compile or load package", [time.perf_counter() - started], 0.0)
        benches.append(Bench(assemble(loaded, config, forward), config, "compiled"))
    if neighbours:
        for count in neighbours:
            measure_beside(benches[-1], count, batch, context[0], prompt[0])
        return
    machine = measure_machine(next(loaded.module.parameters()).dtype)
    for size in batch:
        for length in context:
            roof_s = roofline_s(loaded, machine, size, size * length)
            for bench in benches:
                bench.decode([length] * size, 2)
                total, host = bench.decode([length] * size, steps)
                facts = {"label": bench.label, "batch": size, "context": length}
                host_share = round(statistics.median(host) / statistics.median(total), 4)
                print_times("decode step", total, roof_s, **facts, host_share=host_share)
                print_times("scheduler and bookkeeping", host, 0.0, **facts)
    for length in prompt:
        roof_s = roofline_s(loaded, machine, length, length)
        for bench in benches:
            bench.prompt(length)
            spent = [bench.prompt(length) for _ in range(4)]
            print_times("prompt", spent, roof_s, label=bench.label, tokens=length, tok_s=round(length / min(spent)))


if __name__ == "__main__":
    typer.run(main)
