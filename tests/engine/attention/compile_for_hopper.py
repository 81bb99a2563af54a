"""Compile the kernels for an H100 or H200, where there need be none: python tests/engine/attention/compile_for_hopper.py.

A process of its own, because Triton interprets or compiles for the life of a process. One line a kernel: its name, and the
bytes of shared memory that it takes.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_kernels as kernels
from engine.attention.triton_backend import choose_tiles

HOPPER = GPUTarget("cuda", 90, 32)
OF_THE_POOL = {"out", "query", "key", "value", "pool", "sinks"}
TABLES = {"context_lens", "table_starts", "pages", "query_starts", "block_requests", "block_firsts"}


def compiled(name: str, constants: dict[str, object], warps: int) -> int:
    """Bytes of shared memory that the kernel takes; it raises what the compiler does."""
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
    return int(triton.compile(source, target=HOPPER, options={"num_warps": warps}).metadata.shared)


def main() -> None:
    """All kernels twice, in bfloat16: as Qwen3 uses them, and with all that models ask for, an odd head size included."""
    dtype = torch.bfloat16
    for head_dim, special in ((128, False), (80, True)):
        tiles = choose_tiles(head_dim, dtype)
        shape = {"GROUP": 4, "KV_HEADS": 8, "LAYERS": 36, "PAGE": 16, "HEAD_DIM": head_dim}
        shape |= {"BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_H": 16, "SPLITS": 64}
        shape |= {
            "PRECISION": "tf32",
            "OPERANDS": kernels.OPERANDS[dtype],
            "WINDOWED": special,
            "CAPPED": special,
            "SINKS": special,
        }
        decode = shape | {"BLOCK_N": tiles.decode_n, "STAGES": tiles.decode_stages}
        prompt = shape | {"BLOCK_M": tiles.prompt_m, "BLOCK_N": tiles.prompt_n, "STAGES": tiles.prompt_stages}
        for split in (False, True):
            print("decode", compiled("decode_kernel", decode | {"SPLIT": split}, tiles.decode_warps))
        print("prompt", compiled("prompt_kernel", prompt, tiles.prompt_warps))
        print("write", compiled("write_kernel", prompt, 4))
        print("join", compiled("join_kernel", shape, 2))


if __name__ == "__main__":
    main()
