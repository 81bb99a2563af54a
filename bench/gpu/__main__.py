"""Check and measure everything that needs a GPU. Prints one JSON line per figure, and at the end one per target.

    python -m bench.gpu                                     # all parts except tune
    python -m bench.gpu --part kernels --part ids           # correctness; exits with 1 on a fault
    python -m bench.gpu --part steps --part sampling        # Qwen3-4B's shape, random weights, bf16
    python -m bench.gpu --part mesh-ids --part mesh         # a whole mesh on one card
    python -m bench.gpu --part tune                         # the kernels with other tiles, compared with torch's attention
    python -m bench.gpu --device cpu                        # the same lines with a tiny model; its figures are meaningless

Rooflines use the copy bandwidth and matmul rate that were just measured. Parts that share no engine run in their own
processes, because after some errors a process can no longer use a device.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.engine import measure_machine
from bench.gpu.correct import check_checksums, check_draws, check_ids, check_kernels, check_offload
from bench.gpu.engines import config_of, make_bench
from bench.gpu.report import Report, engine_lines, print_figure
from bench.gpu.scale import CARD, ON_CPU, Scale
from bench.gpu.steps import (
    measure_host,
    measure_idle,
    measure_mixed,
    measure_ranks,
    measure_sampling,
    measure_skew,
    measure_steps,
)
from bench.gpu.transfer import measure_transfer
from bench.gpu.tune import tune
from bench.gpu.whole_mesh import check_mesh, measure_mesh
from engine.kv.storage import TORCH_DTYPES


class Part(StrEnum):
    KERNELS = auto()
    IDS = auto()
    CHECKSUMS = auto()
    OFFLOAD = auto()
    TRANSFER = auto()
    TP2 = auto()
    MESH_IDS = "mesh-ids"
    MESH = auto()
    HOST = auto()
    STEPS = auto()
    MIXED = auto()
    SAMPLING = auto()
    SKEW = auto()
    TUNE = auto()


WITH_ENGINE = {Part.STEPS, Part.MIXED, Part.SAMPLING, Part.SKEW}


def run(parts: list[Part], scale: Scale, report: Report, keep: Path | None = None) -> Iterator[bool]:
    """Run the parts. Those that need all of the device's memory run before this process creates an engine.

    Yields: whether a part's results are right.
    """
    checks: dict[Part, Callable[[], bool]] = {
        Part.KERNELS: lambda: all([check_draws(scale), check_kernels(scale)]),
        Part.IDS: lambda: check_ids(scale),
        Part.CHECKSUMS: lambda: check_checksums(scale),
        Part.OFFLOAD: lambda: check_offload(scale),
        Part.TRANSFER: lambda: measure_transfer(scale, report),
        Part.TP2: lambda: measure_ranks(scale),
        Part.MESH_IDS: lambda: check_mesh(scale, keep),
        Part.MESH: lambda: measure_mesh(scale, report, keep),
    }
    for part, check in checks.items():
        if part in parts:
            yield check()
            _free(scale)
    if Part.HOST in parts:
        measure_host(scale)
    if WITH_ENGINE.isdisjoint(parts) and Part.TUNE not in parts:
        return
    dtype = TORCH_DTYPES[scale.dtype]
    machine = measure_machine(dtype, scale.device)
    _free(scale)
    name = "cpu" if scale.on_cpu else torch.cuda.get_device_name()
    speeds = {"copy_tb_s": machine.copy_bytes_s / 1e12, "matmul_tflop_s": machine.matmul_flop_s / 1e12}
    print_figure(
        "device", name=name, torch=torch.__version__, **{name: round(speed, 3) for name, speed in speeds.items()}
    )
    if Part.TUNE in parts:
        tune(scale, machine)
    if WITH_ENGINE.isdisjoint(parts):
        return
    bench, loaded = make_bench(scale.model, config_of(scale), "tiny" if scale.on_cpu else "Qwen3-4B")
    if Part.STEPS in parts:
        measure_steps(scale, bench, loaded, machine, report)
    if Part.MIXED in parts:
        measure_mixed(scale, bench)
    if Part.SAMPLING in parts:
        measure_sampling(scale, bench, report)
    if Part.SKEW in parts:
        measure_skew(scale, bench, loaded, machine, report)
    if Part.STEPS in parts:
        measure_idle(scale, bench)  # last, because CUDA's profiler slows everything after it


def apart(parts: Sequence[Part]) -> list[list[Part]]:
    """Group `parts` by process, in the order of `Part`."""
    together = [part for part in Part if part in parts and part in WITH_ENGINE]
    alone = [[part] for part in Part if part in parts and part not in WITH_ENGINE]
    return [*alone, together] if together else alone


def run_apart(groups: Sequence[Sequence[Part]], device: str, keep: Path | None = None) -> bool:
    """Run each group in a process, and print its figures. Return whether all exited with 0."""
    targets: dict[str, str] = {}  # lines of targets that no process has measured yet
    measured: set[str] = set()
    codes = []
    for parts in groups:
        options = [word for part in parts for word in ("--part", part)]
        options += [] if keep is None else ["--keep", str(keep)]
        command = [sys.executable, "-m", "bench.gpu", "--device", device, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith('{"figure": "target"'):
                    print(line, end="", flush=True)
                elif "value" in (target := json.loads(line)):
                    measured.add(target["what"])
                    print(line, end="", flush=True)
                else:
                    targets[target["what"]] = line
        codes.append(process.returncode)
        if process.returncode:
            print_figure("failed", parts=parts, exit=process.returncode)
    print(*(line for what, line in targets.items() if what not in measured), sep="", end="", flush=True)
    return not any(codes)


def _free(scale: Scale) -> None:
    gc.collect()
    if not scale.on_cpu:
        torch.cuda.empty_cache()


def scale_of(device: str) -> Scale:
    if device == "cpu":
        return ON_CPU
    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs a CUDA device, and torch finds none; `--device cpu` runs a tiny form of every part")
    return replace(CARD, device=device)


def main(
    part: Annotated[
        list[Part] | None, typer.Option(help="may be given several times; default: all except tune")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda:N, or cpu for a tiny form of every part")] = "cuda:0",
    keep: Annotated[
        Path | None, typer.Option(help="directory for the logs of the parts mesh and mesh-ids", file_okay=False)
    ] = None,
) -> None:
    scale = scale_of(device)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    groups = apart(part or [each for each in Part if each is not Part.TUNE])
    if len(groups) > 1:
        sys.exit(not run_apart(groups, device, keep))
    if not scale.on_cpu:
        torch.cuda.set_device(device)
    report = Report(judged=not scale.on_cpu)
    with engine_lines():
        right = list(run(groups[0], scale, report, keep))
    report.print_targets()
    sys.exit(not all(right))


if __name__ == "__main__":
    typer.run(main)
