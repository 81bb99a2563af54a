"""Steps on scratch pages, for a model's export or trial."""

from typing import Any, Final

import torch

from components.wire.layout import KvLayout
from engine.attention.backend import StepShape
from engine.attention.cpu import CpuAttention, CpuStep
from engine.compilation.forward import EagerForward, Forward
from engine.kv.storage import allocate_storage

PROMPT: Final = 40  # tokens, more than two of the smallest pages
# relative to the logits' root mean square
TOLERANCE: Final = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1.5e-1, "fp8_e4m3": 1.5e-1}


def scratch_attention(layout: KvLayout, num_tokens: int) -> CpuAttention:
    return CpuAttention(allocate_storage(layout, _pages(layout, num_tokens), torch.device("cpu")), layout)


def step_of(attention: CpuAttention, layout: KvLayout, length: int, context: int) -> CpuStep:
    return attention.plan(StepShape([length], [context], [list(range(_pages(layout, context)))]))


@torch.inference_mode()
def difference(module: Any, forward: Forward, layout: KvLayout) -> float:
    """Compare logits with those of the eager `module`, for a prompt and a decode.

    Returns: the root mean square difference in units of the tolerance: correct up to 1; NaN if any logit is NaN.
    """
    worst = torch.zeros(())
    ids = torch.arange(PROMPT + 1) * 7919 % module.get_input_embeddings().num_embeddings
    positions = torch.arange(PROMPT + 1)
    eager, own = EagerForward(module), [scratch_attention(layout, PROMPT + 1) for _ in range(2)]
    for first, last in ((0, PROMPT), (PROMPT, PROMPT + 1)):
        keep = torch.arange(last - first)
        steps = [step_of(attention, layout, last - first, last) for attention in own]
        expected = eager(ids[first:last], positions[first:last], keep, steps[0])
        found = forward(ids[first:last], positions[first:last], keep, steps[1])
        allowed = TOLERANCE[layout.dtype] * expected.float().square().mean().sqrt()
        worst = torch.maximum(worst, (found.float() - expected.float()).square().mean().sqrt() / allowed)
    return worst.item()


def _pages(layout: KvLayout, num_tokens: int) -> int:
    return max(2, layout.pages_for(num_tokens))  # torch specialises a dimension of size 1
