"""Compile the kernels for an H100 or H200, where there need be none: python tests/engine/attention/compile_for_hopper.py.

A process of its own, because Triton interprets or compiles for the life of a process. One line a kernel: its name, and the
bytes of shared memory, the registers of a thread and the bytes of spilled registers that it takes.
"""

import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.attention import triton_kernels as kernels
from engine.attention.step_tables import SPAN
from engine.attention.triton_backend import JOINED, choose_tiles

HOPPER = GPUTarget("cuda", 90, 32)
PTXAS = get_ptxas(90).path
OF_THE_POOL = {"out", "query", "key", "value", "pool", "sinks"}
TABLES = {
    *("header", "context_lens", "table_starts", "slots", "counts", "pages", "query_starts"),
    *("block_requests", "block_firsts", "piece_blocks", "piece_spans"),
}


def compiled(name: str, constants: dict[str, object], warps: int) -> str:
    """What the kernel takes; it raises what the compiler does."""
    kernel = getattr(kernels, name)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in OF_THE_POOL:
            signature[argument] = "*bf16"
        elif argument in TABLES:
            signature[argument] = "*i32"
        else:
            floats = {"partial_out": "*fp32", "partial_log": "*fp32", "scaling": "fp32", "softcap": "fp32"}
            signature[argument] = floats.get(argument, "i32")
        if signature[argument].startswith("*") or argument.endswith("stride"):
            aligned[i,] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return f"{made.metadata.shared} {assembled(made.asm['ptx'])}"


def assembled(ptx: str) -> str:
    """Registers of a thread, and bytes that are stored because they do not suffice."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [PTXAS, "-v", "--gpu-name=sm_90a", source.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", told)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", told)
    return f"{registers} {spilled}"


def main() -> None:
    """All kernels in bfloat16: for Qwen3-4B, for gpt-oss, and with all that models ask for and an odd head size."""
    dtype = torch.bfloat16
    for head_dim, group, special, sinks in ((128, 4, False, False), (64, 8, True, True), (80, 7, True, True)):
        tiles = choose_tiles(head_dim, dtype)
        shape = {"GROUP": group, "KV_HEADS": 8, "LAYERS": 36, "PAGE": 16, "HEAD_DIM": head_dim, "SPAN": SPAN}
        shape |= {"BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_H": 16, "BLOCK_S": JOINED}
        shape |= {"PRECISION": "tf32", "OPERANDS": kernels.OPERANDS[dtype]}
        shape |= {"WINDOWED": special, "CAPPED": special and head_dim == 80, "SINKS": sinks}
        decode = shape | {"BLOCK_N": tiles.decode_n, "STAGES": tiles.decode_stages}
        prompt = shape | {"BLOCK_N": tiles.prompt_n, "STAGES": tiles.prompt_stages}
        print("decode", compiled("decode_kernel", decode, tiles.decode_warps))
        print("join", compiled("join_kernel", shape | {"ROWS": group, "DECODES": True}, 4))
        short = min(tiles.prompt_m, triton.next_power_of_2(16 * group))
        for rows in {short, tiles.prompt_m}:
            warps = tiles.prompt_warps if rows == tiles.prompt_m else 4
            tokens = rows // group
            prompt |= {"BLOCK_M": rows, "TOKENS": tokens, "BLOCK_T": triton.next_power_of_2(tokens)}
            print("prompt", compiled("prompt_kernel", prompt, warps))
            print("write", compiled("write_kernel", prompt, 4))
            print("join", compiled("join_kernel", shape | {"ROWS": rows, "DECODES": False}, 4))


if __name__ == "__main__":
    main()
