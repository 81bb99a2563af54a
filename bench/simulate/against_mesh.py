"""Compares the simulator with a mesh of mock engines under the same requests. Prints one JSON line for each.

python -m bench.simulate.against_mesh                            # aggregated: 3 workers
python -m bench.simulate.against_mesh --prefill 2 --decode 2
"""

import asyncio
import json
import random
from typing import Annotated, Any

import typer

from bench.load.client import Body, Run, body_of, open_loop
from bench.load.report import quantile_ms
from bench.load.workloads import PlannedRequest, words
from bench.processes import free_port, mesh, model_name
from bench.simulate.fleet import Fleet
from bench.simulate.measured import Measured
from bench.simulate.setup import Link, Setup
from bench.simulate.traffic import Lengths, Request, shared_prefixes
from bench.simulate.worker import Engine
from components.routing.policies import parse_policy
from engine.config import MockConfig

PAGE = 16
PAGES = 8192
STEP_TOKENS = 512
MOCK = {"LAYERS": 1, "KV_HEADS": 1, "HEAD_DIM": 8}  # small pages, because only times are compared


def body(request: Request, model: str) -> Body:
    parts = [words(random.Random(block), PAGE) for block in request.blocks]
    rest = request.prompt - PAGE * len(request.blocks)
    if rest:
        parts.append(words(random.Random(f"{request.number}/rest"), rest))
    return body_of(PlannedRequest(" ".join(parts), request.prompt, request.output), model)


def in_mesh(requests: list[Request], prefill: int, decode: int, cost: MockConfig) -> Run:
    env = {f"MESH_ENGINE__MOCK__{name}": str(value) for name, value in MOCK.items()}
    env |= {"MESH_ENGINE__MOCK__SPEEDUP": str(cost.speedup), "MESH_ENGINE__NUM_PAGES": str(PAGES)}
    env |= {"MESH_ENGINE__MAX_STEP_TOKENS": str(STEP_TOKENS), "MESH_ENGINE__PACK_TOKENS": str(STEP_TOKENS)}
    env |= {"MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false"}
    port = free_port()
    with mesh("mock:smollm2-135m", {"prefill": prefill, "decode": decode}, env, port):
        model = model_name(port)
        bodies = [(request.at_s, body(request, model)) for request in requests]
        return asyncio.run(open_loop(f"http://127.0.0.1:{port}", bodies))


def simulated(requests: list[Request], prefill: int, decode: int, cost: MockConfig) -> Measured:
    engine = Engine(cost, PAGES, PAGE, 64, STEP_TOKENS)
    setup = Setup(decode, prefill, engine, link=Link(2 * 8 * 2), prefill_routers=decode)
    return Fleet(
        setup,
        requests,
        lambda rng: parse_policy("round_robin").make("decode", rng),
        lambda rng: parse_policy("round_robin").make("prefill", rng),
    ).run()


def main(
    prefill: Annotated[int, typer.Option(help="prefill workers; 0: aggregated")] = 0,
    decode: Annotated[int, typer.Option(help="decode workers")] = 3,
    count: Annotated[int, typer.Option("--requests", help="in all")] = 200,
    rate: Annotated[float, typer.Option(help="requests per second")] = 4.0,
    speedup: Annotated[float, typer.Option(help="speed factor of the mock engine")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the requests")] = 1,
) -> None:
    lengths = Lengths(prefix=256, question=256, answer=48, sigma=0.6, block=PAGE)

    def requests() -> list[Request]:
        return list(shared_prefixes(seed, count, rate, 8, 0.5, lengths))

    cost = MockConfig(speedup=speedup)
    run = in_mesh(requests(), prefill, decode, cost)
    facts: dict[str, Any] = {
        "prefill": prefill,
        "decode": decode,
        "rate": rate,
        "speedup": speedup,
        "failed": run.failed,
    }
    for label, times in (("mesh", run), ("simulator", simulated(requests(), prefill, decode, cost))):
        figures = {
            f"{name}_ms_p{q}": quantile_ms(list(values), q / 100)
            for name, values in (("ttft", times.ttft_s), ("tpot", times.tpot_s), ("e2e", times.e2e_s))
            for q in (50, 90)
        }
        print(json.dumps({"label": label, **facts, "requests": len(times.ttft_s), **figures}), flush=True)


if __name__ == "__main__":
    typer.run(main)
