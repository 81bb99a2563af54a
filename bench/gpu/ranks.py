"""One engine on two devices beside one on one. On a CPU the two ranks share the cores."""

import torch

from bench.engine import Bench, say
from bench.gpu.engines import config_of, generate, requests, saved
from bench.gpu.report import tell
from bench.gpu.scale import TINY, Scale
from engine.build import build_engine

RANKS = 2


def measure_ranks(scale: Scale) -> bool:
    devices = RANKS if scale.on_cpu else torch.cuda.device_count()
    if devices < RANKS:
        tell("two ranks", skipped=f"this needs {RANKS} devices, and {devices} is here")
        return True
    same = _same_ids(scale)
    for ranks in (1, RANKS):
        config = config_of(scale, tensor_parallel=ranks)
        with saved(scale.model) as directory:
            engine = build_engine(str(directory), config, directory)
        try:
            bench = Bench(engine, config, f"{ranks} ranks")
            contexts = [scale.context] * scale.batch
            bench.decode(contexts, scale.steps)
            total, _ = bench.decode(contexts, scale.steps)
            say("decode step by ranks", total, 0.0, ranks=ranks, batch=scale.batch, context=scale.context)
            bench.prompt(scale.prompt)
            say(
                "prompt by ranks", [bench.prompt(scale.prompt) for _ in range(3)], 0.0, ranks=ranks, tokens=scale.prompt
            )
        finally:
            engine.close()
    return same


def _same_ids(scale: Scale) -> bool:
    found = []
    for ranks in (1, RANKS):
        sizes = {"num_pages": 600, "max_running": 24, "max_step_tokens": 96}
        config = config_of(scale, dtype="float32", tensor_parallel=ranks, **sizes)
        with saved(TINY) as directory:
            engine = build_engine(str(directory), config, directory)
            try:
                found.append(generate(engine, requests(TINY["vocab_size"], 12, prompts=(3, 120), outputs=(20, 40))))
            finally:
                engine.close()
    tell("ids of two ranks", same=found[0] == found[1], tokens=sum(map(len, found[0].values())))
    return found[0] == found[1]
