"""One engine on two devices beside one on one. On a CPU the two ranks share the cores."""

import torch

from bench.engine import Bench, say
from bench.gpu.engines import built, config_of, exact_ids, requests
from bench.gpu.report import tell
from bench.gpu.scale import TINY, Scale

RANKS = 2


def measure_ranks(scale: Scale) -> bool:
    devices = RANKS if scale.on_cpu else torch.cuda.device_count()
    if devices < RANKS:
        tell("two ranks", skipped=f"this needs {RANKS} devices, and {devices} is here")
        return True
    asked = requests(TINY["vocab_size"], 12, prompts=(3, 120), outputs=(20, 40))
    one, several = (exact_ids(scale, asked, tensor_parallel=ranks) for ranks in (1, RANKS))
    tell("ids of two ranks", same=one == several, tokens=sum(map(len, one.values())))
    for ranks in (1, RANKS):
        _measure(scale, ranks)
    return one == several


def _measure(scale: Scale, ranks: int) -> None:
    """Nothing holds the engine afterwards: its memory would be missing in the next one's."""
    config = config_of(scale, tensor_parallel=ranks)
    with built(scale.model, config) as engine:
        bench = Bench(engine, config, f"{ranks} ranks")
        contexts = [scale.context] * scale.batch
        bench.decode(contexts, scale.steps)
        total, _ = bench.decode(contexts, scale.steps)
        say("decode step by ranks", total, 0.0, ranks=ranks, batch=scale.batch, context=scale.context)
        bench.prompt(scale.prompt)
        say("prompt by ranks", [bench.prompt(scale.prompt) for _ in range(3)], 0.0, ranks=ranks, tokens=scale.prompt)
