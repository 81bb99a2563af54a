"""Compares meshes with and without disaggregation on one machine, by turns.

    python -m bench.disaggregation                     # 1 prefill + 1 decode against 2 workers that do both
    python -m bench.disaggregation --aggregated 1      # … against one worker on all cores

Prints one JSON line per figure; see `bench/turns.py`.
"""

import signal
import sys
from contextlib import ExitStack
from typing import Annotated, Final

import typer

from bench.processes import model_name
from bench.turns import (
    Concurrency,
    InputLen,
    Model,
    OutputLen,
    RangeRatio,
    Requests,
    Rounds,
    Target,
    Work,
    by_turns,
    start_kvmesh,
)

TARGETS: Final = (
    Target("ttft_ms_p50", 1.05, clients=[1]),
    Target("output_tok_s", 0.95, clients=[8]),
    Target("itl_ms_p99", 0.5, clients=[8]),
)


def main(
    prefill: Annotated[int, typer.Option(min=1, help="prefill workers of the disaggregated mesh")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="its decode workers")] = 1,
    aggregated: Annotated[
        int | None, typer.Option(min=1, help="workers of the aggregated mesh; default: the same total")
    ] = None,
    rounds: Rounds = 3,
    concurrency: Concurrency = [1, 8],  # noqa: B006
    requests: Requests = 8,
    input_len: InputLen = 256,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 1.0,
    model: Model = "smollm2-135m",
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs every `finally`
    split = {"prefill": prefill, "decode": decode}
    whole = {"prefill": 0, "decode": aggregated or prefill + decode}
    with ExitStack() as stack:
        one = stack.enter_context(start_kvmesh("disaggregated", model, split, {}))
        other = stack.enter_context(start_kvmesh("aggregated", model, whole, {}))
        name = model_name(int(one.url.rpartition(":")[2]))
        work = Work(rounds, concurrency, requests, input_len, output_len, range_ratio)
        by_turns((one, other), name, work, TARGETS)


if __name__ == "__main__":
    typer.run(main)
