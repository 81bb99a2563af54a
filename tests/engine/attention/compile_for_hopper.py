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
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
OF_THE_POOL = {"out", "query", "key", "value", "pool"}
TABLES = {"context_lens", "table_starts", "pages", "query_starts", "block_requests", "block_firsts"}


def compiled(name: str, constants: dict[str, object], dtype: torch.dtype, warps: int) -> int:
    """Bytes of shared memory that the kernel takes; it raises what the compiler does."""
    kernel = getattr(kernels, name)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in OF_THE_POOL:
            signature[argument] = TYPES[dtype]
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
    """All kernels twice: as Qwen3 uses them in bfloat16, and with all that models ask for, in fp32."""
    for dtype, head_dim, special in ((torch.bfloat16, 128, False), (torch.float32, 80, True)):
        tiles = choose_tiles(head_dim, dtype)
        shape = {"GROUP": 4, "KV_HEADS": 8, "LAYERS": 36, "PAGE": 16, "HEAD_DIM": head_dim}
        shape |= {"BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_H": 16, "SPLITS": 64}
        shape |= {"PRECISION": "ieee", "OPERANDS": kernels.OPERANDS[dtype], "WINDOWED": special, "CAPPED": special}
        decode = shape | {"BLOCK_N": tiles.decode_n, "STAGES": tiles.decode_stages}
        prompt = shape | {"BLOCK_M": tiles.prompt_m, "BLOCK_N": tiles.prompt_n, "STAGES": tiles.prompt_stages}
        for split in (False, True):
            print("decode", compiled("decode_kernel", decode | {"SPLIT": split}, dtype, tiles.decode_warps))
        print("prompt", compiled("prompt_kernel", prompt, dtype, tiles.prompt_warps))
        print("write", compiled("write_kernel", prompt, dtype, 4))
        print("join", compiled("join_kernel", shape, dtype, 2))


if __name__ == "__main__":
    main()
