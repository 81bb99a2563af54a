"""Compile the attention kernels for an H100 or H200: python tests/engine/attention/compile_for_hopper.py.

One line a kernel: its name, and the bytes of shared memory, the registers of a thread and the bytes of spilled registers
that it takes.
"""

from typing import Literal

import torch

from components.wire.layout import KvLayout
from engine.attention import triton_kernels
from engine.attention.backend import Scoring, StepShape
from engine.attention.step_tables import StepLimits
from engine.attention.triton_backend import TritonAttention
from engine.kv.storage import TORCH_DTYPES
from tests.engine.hopper import compiled_launches

KV_HEADS, LAYERS, PAGE = 8, 36, 16
LIMITS = StepLimits(256, 8192, 4096)
# query and context lengths: decodes, a short chunk and a longer one, all over contexts of several spans
STEPS = (((1, 1), (1, 3000)), ((3, 20), (4000, 4000)))


def launch_all(
    head_dim: int, group: int, scoring: Scoring, *, sinks: bool, pages: Literal["bfloat16", "fp8_e4m3"] = "bfloat16"
) -> None:
    layout = KvLayout(model="m", dtype=pages, page_size=PAGE, layers=LAYERS, kv_heads=KV_HEADS, head_dim=head_dim)
    pool = torch.zeros(1, KV_HEADS, LAYERS, 2, PAGE, head_dim, dtype=TORCH_DTYPES[pages])
    attention = TritonAttention(pool, layout, group, LIMITS, dtype=torch.bfloat16)
    attention._scores["OPERANDS"] = triton_kernels.OPERANDS[torch.bfloat16]  # on a CPU the interpreter's are chosen
    given = torch.zeros(KV_HEADS * group, dtype=torch.bfloat16) if sinks else None
    for queries, contexts in STEPS:
        step = attention.plan(StepShape(queries, contexts, [[0] * -(-length // PAGE) for length in contexts]))
        # as views of one product, which is what the model gives
        widths = [heads * head_dim for heads in (KV_HEADS * group, KV_HEADS, KV_HEADS)]
        new = torch.split(torch.zeros(1, sum(queries), sum(widths), dtype=torch.bfloat16), widths, -1)
        query, key, value = (part.view(1, sum(queries), -1, head_dim).transpose(1, 2) for part in new)
        step.attend(1, query, key, value, scoring, sinks=given)


def main() -> None:
    """All kernels in bfloat16: for Qwen3-4B, for gpt-oss, with all that models ask for and an odd head size, and for
    pages of 8-bit floats.
    """
    with compiled_launches() as kernels:
        launch_all(128, 4, Scoring(0.088), sinks=False)
        launch_all(64, 8, Scoring(0.125, window=128), sinks=True)
        launch_all(80, 7, Scoring(0.1, 100, 5.0), sinks=True)
        launch_all(128, 4, Scoring(0.088), sinks=False, pages="fp8_e4m3")
    for kernel in kernels:
        print(kernel.name, kernel.shared_bytes, *kernel.assembled())


if __name__ == "__main__":
    main()
