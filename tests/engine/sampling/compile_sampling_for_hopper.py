"""Compile the sampling kernel for an H100 or H200, where there need be none.

    python tests/engine/sampling/compile_sampling_for_hopper.py bf16,fp16,fp32

A process of its own, because Triton interprets or compiles for the life of a process. One line a type of logits: bytes of
shared memory; registers and bytes of spills, by ptxas; instructions that IEEE 754 does not determine or that
round once for two operations; barriers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.sampling import device_kernel as kernel
from engine.sampling.device_sampler import BLOCK, DEPTH, WARPS

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "drawn": "i64",
    "batch": "i32",
    "params": "i64",
    "counts": "i32",
    "bias": "fp32",
    "ends": "i32",
    "masks": "i32",
    "list_distances": "fp32",
    "list_ids": "i32",
}
CONSTANTS = {"BLOCK": BLOCK, "DEPTH": DEPTH}


def compiled(logits: str) -> tuple[int, str]:
    """Bytes of shared memory, and PTX."""
    signature, aligned = {}, {}
    for i, argument in enumerate(kernel.sample_kernel.arg_names):
        if argument in CONSTANTS:
            signature[argument] = "constexpr"
            continue
        kind = (POINTERS | {"logits": logits}).get(argument)
        signature[argument] = "i32" if kind is None else f"*{kind}"
        if argument != "words_stride":  # 151,936 / 32 is no multiple of 16
            aligned[i,] = [["tt.divisibility", 16]]
    values = {(kernel.sample_kernel.arg_names.index(key),): value for key, value in CONSTANTS.items()}
    source = ASTSource(fn=kernel.sample_kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    done = triton.compile(source, target=HOPPER, options=options)
    return int(done.metadata.shared), str(done.asm["ptx"])


def assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread and bytes of spills."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "--fmad=false", str(source), "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert registers is not None, told
    assert spills is not None, told
    return int(registers[1]), int(spills[1]) + int(spills[2])


def main() -> None:
    for logits in sys.argv[1].split(","):
        shared, ptx = compiled(logits)
        inexact = len(re.findall(r"\bfma\.|\bmad\.(?:rn\.)?f|\.approx|\.ftz|div\.full", ptx))
        barriers = len(re.findall(r"\bbar\.sync|\bbarrier\.sync", ptx))
        print(logits, shared, *assembled(ptx), inexact, barriers)


if __name__ == "__main__":
    main()
