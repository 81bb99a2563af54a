"""Compile the sampling kernel for an H100 or H200: python tests/engine/sampling/compile_sampling_for_hopper.py bfloat16.

One line a type of logits and batch: bytes of shared memory; registers and bytes of spills, by ptxas; instructions that
IEEE 754 does not determine or that round once for two operations; barriers.
"""

import re
import sys

import torch

from engine.sampling.device_sampler import DeviceSampler
from tests.engine.hopper import compiled_launches
from tests.engine.sampling.reference import make_row

VOCAB = 151_936


def main() -> None:
    for name in sys.argv[1].split(","):
        with compiled_launches() as kernels:
            for rows in (1, 2):
                logits = torch.zeros(rows, VOCAB, dtype=getattr(torch, name))
                DeviceSampler(torch.device("cpu")).draw(logits, [make_row([1, 2]) for _ in range(rows)])
        for kernel in kernels:
            inexact = len(re.findall(r"\bfma\.|\bmad\.(?:rn\.)?f|\.approx|\.ftz|div\.full", kernel.ptx))
            barriers = len(re.findall(r"\bbar\.sync|\bbarrier\.sync", kernel.ptx))
            print(name, kernel.shared_bytes, *kernel.assembled(), inexact, barriers)


if __name__ == "__main__":
    main()
